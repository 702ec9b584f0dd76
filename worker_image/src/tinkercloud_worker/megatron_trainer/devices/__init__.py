"""The device that megatron-core computes on: CPU or GPU."""
