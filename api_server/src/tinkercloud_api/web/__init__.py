"""HTTP without knowledge of sessions: middleware, connections, errors, statuses."""
