"""Sampling sessions, the weights that they sample from, and running samples."""
