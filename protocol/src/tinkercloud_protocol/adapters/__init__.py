"""Adapters and base models from elsewhere: formats, and whether they fit."""
