"""HTTP: each handler reads a request, checks whose it is, asks the parts, and answers."""
