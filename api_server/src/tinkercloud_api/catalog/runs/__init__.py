"""Rows about sessions, runs, samplers and programs."""
