"""Decisions: from a snapshot of one session to actions, a status and a deadline. Pure."""
