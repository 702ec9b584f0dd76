"""Providers of session heads: as local child processes or as Kubernetes pods."""
