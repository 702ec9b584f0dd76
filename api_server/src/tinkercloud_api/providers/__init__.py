"""Where session heads come from: child processes here, pods on a cluster."""
