"""The base model: files, checks, loading and layers."""
