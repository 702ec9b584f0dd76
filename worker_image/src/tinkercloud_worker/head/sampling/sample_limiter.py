"""Limits the queued and running sampling requests of each owner."""

from dataclasses import dataclass

from tinkercloud_protocol.wire.errors import Overloaded


@dataclass(slots=True)
class _Usage:
    requests: int = 0
    num_bytes: int = 0


class SampleLimiter:
    """Counts the sampling requests of each owner against per-owner limits."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        """Start with no requests.

        Args:
            max_requests: requests of one owner.
            max_bytes: total size of one owner's requests; a single request may exceed it.
        """
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._usage: dict[str, _Usage] = {}

    def check(self, owner: str, size: int) -> None:
        """Check that an owner may add a request of that many bytes.

        Raises:
            Overloaded: the owner has reached a limit.
        """
        if (reason := self._why_not(owner, size)) is not None:
            raise Overloaded(
                f"{reason}; wait until some have finished, then send the request again"
            )

    def why_full(self, owner: str) -> str | None:
        """Return why an owner's next request would be rejected; None if it would be accepted."""
        return self._why_not(owner, 1)

    def _why_not(self, owner: str, size: int) -> str | None:
        usage = self._usage.get(owner, _Usage())
        if usage.requests >= self._max_requests:
            return (
                f"{usage.requests} sampling requests of owner {owner!r} are already queued"
                f" (sampler.max_queued_requests is {self._max_requests})"
            )
        if usage.requests and usage.num_bytes + size > self._max_bytes:
            return (
                f"{usage.num_bytes} bytes of sampling requests of owner {owner!r} are already"
                " queued"
                f" (limits.max_queued_bytes is {self._max_bytes})"
            )
        return None

    def add(self, owner: str, size: int) -> None:
        """Add a request to the count."""
        usage = self._usage.setdefault(owner, _Usage())
        usage.requests += 1
        usage.num_bytes += size

    def remove(self, owner: str, size: int) -> None:
        """Remove a request from the count."""
        usage = self._usage[owner]
        usage.requests -= 1
        usage.num_bytes -= size
        if not usage.requests:
            del self._usage[owner]
