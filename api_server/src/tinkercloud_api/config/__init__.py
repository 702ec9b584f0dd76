"""Settings, the state folder, logs and metrics of the API server."""
