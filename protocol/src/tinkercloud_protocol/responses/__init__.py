"""Responses to clients."""
