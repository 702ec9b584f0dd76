"""LoRA adapters: their tensors, the layers that apply them, and batches with several adapters."""
