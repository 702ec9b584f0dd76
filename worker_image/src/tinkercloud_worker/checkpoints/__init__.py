"""Checkpoints: their contents (`formats`) and how they are stored (`store`)."""
