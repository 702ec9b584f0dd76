"""The formats in which models write calls of tools: how each is found, read and enforced."""
