"""Samples on the trainer's own weights and kernels, with continuous batching."""
