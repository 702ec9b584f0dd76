"""Shared parts of all trainers: micro-batches, Adam and replicas."""
