"""Decisions about the pool of a BaseModel: its clusters, members, moves and warm spares. Pure."""
