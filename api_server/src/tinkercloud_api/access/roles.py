"""The roles of API keys."""

from enum import StrEnum


class Role(StrEnum):
    """What a key may do."""

    USER = "user"
    """Everything with its owner's objects."""
    ADMIN = "admin"
    """Also read and delete the objects of all owners, and manage users and their keys."""
    READ_ONLY = "read-only"
    """Only read its owner's objects."""
