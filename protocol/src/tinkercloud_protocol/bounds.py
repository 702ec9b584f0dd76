"""Bounds that requests in JSON and in protobuf share."""

MAX_TOKENS_AT_A_POSITION = 1024
"""Tokens that may be asked about at one position: the result has a value for each of them, however
few bytes name them."""
