"""The planner: chooses how a model is divided over GPUs, and estimates the memory it needs.

All functions are pure. In the order in which they build on each other: `families` reads a Hugging
Face configuration into an `architecture`, `gpus` describes the GPUs, `memory` estimates the memory
of one GPU, `search` chooses a layout, and `plan` turns it into a part of a BaseModel. `serving`
plans one GPU without a cluster.
"""
