"""The accelerator: its memory, matrix products and packed attention."""
