"""Decisions about one session: its plan, lifetime and status. Pure."""
