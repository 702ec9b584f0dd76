"""What administrators start by command: checks, plans, draining, rebuilding the catalog."""
