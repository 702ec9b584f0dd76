"""Custom losses: traced functions as data, their operations and limits."""
