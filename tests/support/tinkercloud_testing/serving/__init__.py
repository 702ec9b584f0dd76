"""Servers and session heads that tests start."""
