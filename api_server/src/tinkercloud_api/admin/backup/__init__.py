"""Backups of a server: one file with its catalog, settings, checkpoints and journals."""
