"""Runs that survive their head: journals, snapshots, suspension and recovery."""
