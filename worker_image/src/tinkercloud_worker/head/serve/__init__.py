"""The HTTP service of a head, its startup and shutdown."""
