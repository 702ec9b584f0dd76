"""Contracts between session heads, API servers and the operator."""
