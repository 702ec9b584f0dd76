"""Trains adapters, or whole models, with megatron-core.

No other part of the worker imports megatron or mbridge.
"""
