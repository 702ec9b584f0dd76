"""Decoding: from running sequences to their next tokens."""
