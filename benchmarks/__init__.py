"""Benchmarks that compare with a plain loop in the same run, without assertions."""
