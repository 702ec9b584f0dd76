"""Session heads and programs on Kubernetes."""
