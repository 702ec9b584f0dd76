"""Rate limit for unknown API keys: each address has a burst allowance, then one try a second."""

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

from tinkercloud_protocol.errors import Overloaded

_ATTEMPTS = 20
"""Burst of failed attempts that an address may make."""
_ATTEMPTS_PER_SECOND = 1.0
_MAX_ADDRESSES = 10_000
"""Limit of remembered addresses; the least recent one is dropped first."""


class Throttle:
    """Counts failed attempts by address, with a token bucket for each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tried: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Current number of attempts and its time, by address."""

    def check(self, address: str) -> None:
        """Check that an address may try another key.

        Raises:
            Overloaded: the address has made too many failed attempts.
        """
        if self._count(_network(address)) > _ATTEMPTS - 1:
            raise Overloaded(
                "too many unknown API keys from this address; correct TINKER_API_KEY and try"
                " again later"
            )

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
    return str(ipaddress.ip_network((parsed, 64), strict=False))
