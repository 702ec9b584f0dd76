"""Handlers about the caller: keys, projects, usage, billing, and the audit log."""
