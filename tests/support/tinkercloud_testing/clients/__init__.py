"""Clients that tests use: the SDK, browsers, plain HTTP."""
