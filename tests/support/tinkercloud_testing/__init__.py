"""Builders, tiny models and running servers for tests, typed like the packages under test."""
