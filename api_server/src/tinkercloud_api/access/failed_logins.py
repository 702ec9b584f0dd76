"""Rate limit for unknown API keys: each address has a burst allowance, then one try a second.

A valid key always passes, since all clients behind a proxy may have one address: every key is
looked up, for addresses over their limit a few at a time.
"""

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from tinkercloud_api.access.auth import Principal
from tinkercloud_protocol.wire.errors import Overloaded, Unauthenticated

LookUp = Callable[[], Awaitable[Principal]]
"""Returns the holder of a key, or raises Unauthenticated."""

_ATTEMPTS = 20
"""Burst of failed attempts that an address may make."""
_ATTEMPTS_PER_SECOND = 1.0
LIMIT = f"{_ATTEMPTS}, then {_ATTEMPTS_PER_SECOND:g}/s"
"""Failed attempts from one address, for people who read the table of routes."""
_CONCURRENT = 2
"""Concurrent lookups for all addresses that have made too many failed attempts."""
_MAX_ADDRESSES = 10_000
"""Limit of remembered addresses; the least recent one is dropped first."""


class Throttle:
    """Counts failed attempts by address, with a token bucket for each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tried: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Current number of attempts and its time, by address."""
        self._lookups = asyncio.Semaphore(_CONCURRENT)

    async def holder(self, address: str, look_up: LookUp) -> Principal:
        """Return the holder of a key that this process does not know yet.

        Args:
            address: address of the client.
            look_up: looks it up.

        Raises:
            Unauthenticated: the key is unknown.
            Overloaded: it is unknown, and so were too many others from this address.
        """
        if not self.is_over(address):
            return await self._counted(address, look_up)
        async with self._lookups:
            try:
                return await self._counted(address, look_up)
            except Unauthenticated:
                raise Overloaded(
                    "too many unknown API keys from this address; correct TINKER_API_KEY and try"
                    " again later"
                ) from None

    async def _counted(
        self, address: str, look_up: Callable[[], Awaitable[Principal]]
    ) -> Principal:
        try:
            return await look_up()
        except Unauthenticated:
            self.record_failure(address)
            raise

    def is_over(self, address: str) -> bool:
        """Whether an address has made too many failed attempts."""
        return self._count(_network(address)) > _ATTEMPTS - 1

    def record_failure(self, address: str) -> None:
        """Count a failed attempt.

        Attempts that are still being looked up do not count: a client with a valid key may send
        many requests at once.
        """
        network = _network(address)
        self._tried[network] = (min(self._count(network) + 1, _ATTEMPTS), self._clock())
        self._tried.move_to_end(network)
        if len(self._tried) > _MAX_ADDRESSES:
            self._tried.popitem(last=False)

    def _count(self, network: str) -> float:
        count, when = self._tried.get(network, (0.0, 0.0))
        return max(0.0, count - (self._clock() - when) * _ATTEMPTS_PER_SECOND)


def _network(address: str) -> str:
    """Return the network that one client can choose its address from: a /64 for IPv6."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        # A socket of both protocols (--host ::) names peers so.
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
