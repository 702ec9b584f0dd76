"""What one GPU does: the engine's numbers against Hugging Face's, and its speed and memory.

`python -m benchmarks.gpu` runs all of it in less than ten minutes. It needs torch and transformers;
no model hub, no server, no installation of this project. `--device cpu --size tiny` runs every part
on any machine, to show that it works; its figures mean nothing then.
"""
