"""The Kubernetes client and informer that the operator and the API server share."""
