"""Decisions: from one session as observed to actions, a status and a deadline. Pure."""
