"""Requests about training and sampling, and the tensors and images in them."""
