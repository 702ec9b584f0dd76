"""Rows about rights: keys, users, projects, and the audit log."""
