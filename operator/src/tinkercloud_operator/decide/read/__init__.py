"""Reading Kubernetes objects and messages of the API server. Pure."""
