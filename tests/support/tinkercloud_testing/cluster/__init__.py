"""A real Kubernetes cluster on this machine, for tests; docs/contribute/cluster-tests.md is its manual."""
