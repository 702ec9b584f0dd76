"""Decisions between owners: quotas of tenants, and the order of starts. Pure."""
