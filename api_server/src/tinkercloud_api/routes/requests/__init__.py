"""Handlers of requests that session heads execute, and of their results."""
