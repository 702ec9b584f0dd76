"""Builders, tiny models and started servers for the tests. Typed like the packages it tests."""
