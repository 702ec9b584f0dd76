"""Chooses one of several equivalent servers for a request. Pure functions.

Rendezvous hashing gives every key an order of the servers that is stable when servers are added or
removed. Requests of a key go to the first server, which has its prompts cached, until its load
exceeds its share; further requests go to the next.
"""

import hashlib
import math
from collections.abc import Mapping

_SLACK = 1.25
"""Maximum load of a server relative to the average, for the sake of its cache."""
_ALWAYS_TAKEN = 8
"""Requests that a server accepts regardless of the load of others."""


def order(key: str, servers: Mapping[str, int]) -> list[str]:
    """Return all servers in the order of preference of a key."""

    def weight(server: str) -> bytes:
        return hashlib.blake2b(f"{server}\0{key}".encode(), digest_size=16).digest()

    return sorted(servers, key=weight)


def choose(key: str, running: Mapping[str, int]) -> str:
    """Return the server for a request.

    Args:
        key: routing key; requests with the same key share prompts.
        running: number of requests by server, for at least one server.
    """
    share = _SLACK * (sum(running.values()) + 1) / len(running)
    bound = max(math.ceil(share), _ALWAYS_TAKEN)
    return next(server for server in order(key, running) if running[server] < bound)
