"""From a model and GPUs to the shapes of a BaseModel: how it is split, and what memory it takes.

Pure functions, in the order in which they build on each other: `families` reads a Hugging Face
configuration into an `architecture`, `fleet` says what GPUs there are, `memory` estimates what one
of them must hold, `planner` chooses.
"""
