"""Handlers about training runs and their checkpoints."""
