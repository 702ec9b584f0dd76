"""Nodes that run real pods, nodes that are lost, and their volumes."""
