"""Commands about runs that need more than a request: a live view of all, export of curves."""
