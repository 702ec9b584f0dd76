"""Handlers about SDK sessions and programs."""
