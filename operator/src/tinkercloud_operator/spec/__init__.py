"""The resolved spec of a session and the snapshot of its objects in the cluster. Pure."""
