"""A real Kubernetes cluster on this machine, for tests; docs/cluster-tests.md is its manual."""
