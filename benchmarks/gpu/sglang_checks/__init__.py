"""Checks of SGLang itself, on a GPU and on a CPU."""
