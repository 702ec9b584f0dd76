"""The grammar of every request and response: identifiers, paths, errors, JSON, ASGI."""
