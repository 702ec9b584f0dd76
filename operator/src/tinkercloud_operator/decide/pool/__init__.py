"""Decisions about the pool of a BaseModel: its clusters, sessions, moves and warm spares. Pure."""
