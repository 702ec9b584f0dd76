"""GPU benchmarks: the engine's accuracy against Hugging Face, speed and memory on one GPU.

`python -m benchmarks.gpu` runs all of them in less than ten minutes. It needs torch and
transformers, but no model hub, server or installation of this project. `--device cpu --size tiny`
runs every part on any machine as a smoke test, without meaningful figures.
"""
