"""Layers of megatron-core models with adapters."""
