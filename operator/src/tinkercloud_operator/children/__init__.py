"""Builders of a session's children: pure functions from a resolved spec to manifests."""
