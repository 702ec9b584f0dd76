"""Trains adapters or full models with megatron-core.

No other part of the worker imports megatron or mbridge.
"""
