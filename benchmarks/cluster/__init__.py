"""Kubernetes: the operator at scale, and pools."""
