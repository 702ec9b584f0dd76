"""The session head: the process that holds a base model and trains and samples adapters of it.

`__main__` assembles it. `head` speaks HTTP and keeps order; `engine` says what a trainer and a
sampler must do; `torch_trainer` and `torch_sampler` do it with torch on the head's own process;
`checkpoints` reads and writes the object store. The head receives its trainer and sampler and
knows nothing of how they work.
"""
