"""Ranks that compute together, as Ray actors. No other part of the worker imports ray."""
