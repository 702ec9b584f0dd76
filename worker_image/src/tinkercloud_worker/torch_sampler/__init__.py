"""A sampler with continuous batching that shares the trainer's weights and kernels."""
