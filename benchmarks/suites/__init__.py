"""What `make bench` measures, and what it measures on request: a `measure` in each module."""
