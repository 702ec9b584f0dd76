"""Custom resources of tests, and what must hold for them."""
