"""Trainers on several ranks."""
