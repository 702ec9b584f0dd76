"""Which answers a request allows, and the grammars that enforce it."""
