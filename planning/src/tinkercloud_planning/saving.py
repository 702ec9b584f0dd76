"""Estimates of the time in which a head saves the state of its models."""

from math import ceil

STORE_BYTES_PER_SECOND = 200_000_000
"""Assumed rate at which a head reads state from ranks, encodes it and writes it to the store."""
_FIXED_SECONDS = 60
"""Time for the parts that do not depend on the size: connecting, retrying, small files."""
_MARGIN = 2
"""How much longer than estimated a save may take."""
_LEAST_SECONDS = 120
_MOST_SECONDS = 86_400
"""Maximum that a BaseModel accepts."""


def suspend_seconds(state: int) -> int:
    """Return how long a head may take to save its state, in whole minutes.

    Args:
        state: Size of the state of all its models in bytes.
    """
    needed = _FIXED_SECONDS + _MARGIN * state / STORE_BYTES_PER_SECOND
    return min(max(60 * ceil(needed / 60), _LEAST_SECONDS), _MOST_SECONDS)
