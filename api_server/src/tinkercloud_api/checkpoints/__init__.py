"""Checkpoints and deferred requests in the object store, and their index in the catalog."""
