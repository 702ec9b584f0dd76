"""Checkpoints: what is in one (`formats`) and how it gets into the object store (`store`)."""
