"""Trains adapters or full models with torch, on this process's own device."""
