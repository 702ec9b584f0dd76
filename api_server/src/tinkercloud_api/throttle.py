"""Bounds what keys that nobody knows cost: each address may try some, and then few a second."""

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

from tinkercloud_protocol.errors import Overloaded

_ATTEMPTS = 20
"""That an address has at once."""
_ATTEMPTS_PER_SECOND = 1.0
_MAX_ADDRESSES = 10_000
"""That are remembered; the one that was seen first is forgotten for another."""


class Throttle:
    """Counts what addresses have tried in vain (a token bucket for each)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tried: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By address, attempts that count and when that was."""

    def check(self, address: str) -> None:
        """Check that an address may try another key.

        Raises:
            Overloaded: it has tried too many.
        """
        if self._count(_network(address)) > _ATTEMPTS - 1:
            raise Overloaded("too many unknown keys came from this address; try again in a moment")

    def note_failure(self, address: str) -> None:
        """Count an attempt that failed.

        One that is being looked up does not count yet: a client that comes back with a good key
        may ask many things at once.
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
    """Return what one client can choose no other address outside of."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False))
