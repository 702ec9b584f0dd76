"""In memory: which sessions hold quota of a tenant, have their turn to start, or share an owner."""
