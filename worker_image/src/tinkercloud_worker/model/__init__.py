"""The base model: its files and their checks, its layers, and how it is loaded."""
