"""Which of several equal servers a request goes to: pure functions.

Rendezvous hashing gives every key an order of the servers that does not change when others come or
go. A key keeps to the first one, which has its prompts cached, until that is busier than its share
allows; what is too much for it goes to the next.
"""

import hashlib
import math
from collections.abc import Mapping

_SLACK = 1.25
"""How much busier than the average a server may be for the sake of its cache."""
_ALWAYS_TAKEN = 8
"""Requests that a server takes however idle the others are."""


def order(key: str, servers: Mapping[str, int]) -> list[str]:
    """Return all servers, the one that a key prefers first."""

    def weight(server: str) -> bytes:
        return hashlib.blake2b(f"{server}\0{key}".encode(), digest_size=16).digest()

    return sorted(servers, key=weight)


def choose(key: str, running: Mapping[str, int]) -> str:
    """Return the server for a request.

    Args:
        key: of the request; requests of one key belong together.
        running: requests that each server has, at least one server.
    """
    share = _SLACK * (sum(running.values()) + 1) / len(running)
    bound = max(math.ceil(share), _ALWAYS_TAKEN)
    return next(server for server in order(key, running) if running[server] < bound)
