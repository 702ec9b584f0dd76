"""Trains adapters, or whole models, with torch on this process's own device."""
