"""Limits that JSON and protobuf requests share."""

MAX_TOKENS_AT_A_POSITION = 1024
"""Maximum number of tokens per position: the result contains a value for each of them, however few
bytes the request has."""

MAX_BATCH_SIZE = 1 << 16
"""Datums with one chunk and two tensors each that a request can always have
(`payloads.MAX_PARTS`)."""
