"""Weights that leave and come in: downloads by signed URLs, archives, copies and imports."""
