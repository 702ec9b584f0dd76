"""Builders of a session's children: pure functions from the session's resolved to manifests."""
