"""The engine thread, and the order in which owners and models use it."""
