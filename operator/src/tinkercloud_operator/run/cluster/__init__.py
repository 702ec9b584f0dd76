"""Reading from and writing to the cluster: objects in memory, actions, calls to heads."""
