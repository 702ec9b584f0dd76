"""Tinkercloud in one distribution: the local server, and the demo."""
