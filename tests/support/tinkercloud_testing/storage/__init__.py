"""Stores, catalogs and hubs, and how they fail."""
