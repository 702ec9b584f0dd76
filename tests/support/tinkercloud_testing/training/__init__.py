"""Trainers and adapters in tests, and what they are compared with."""
