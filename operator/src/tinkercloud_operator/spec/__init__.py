"""The resolved spec of a session and its objects as last observed in the cluster. Pure."""
