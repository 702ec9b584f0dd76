"""A real Kubernetes cluster on this machine, for tests.

Its manual is docs/contribute/cluster-tests.md.
"""
