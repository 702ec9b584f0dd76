"""The order of one model's requests, and their results."""
