"""Measurements, side by side with a plain loop in the same run; never an assertion."""
