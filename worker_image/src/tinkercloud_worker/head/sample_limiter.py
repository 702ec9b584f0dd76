"""Room for sampling requests that wait or run, for each owner."""

from dataclasses import dataclass

from tinkercloud_protocol.errors import Overloaded


@dataclass(slots=True)
class _Taken:
    requests: int = 0
    num_bytes: int = 0


class SampleLimiter:
    """Counts the sampling requests of each owner against limits that every owner has alone."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        """Start with no requests.

        Args:
            max_requests: of one owner.
            max_bytes: of one owner's requests; a single one may be larger.
        """
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._taken: dict[str, _Taken] = {}

    def check(self, owner: str, size: int) -> None:
        """Check that an owner may send one more request of that many bytes.

        Raises:
            Overloaded: too many wait or run already.
        """
        if (reason := self._why_not(owner, size)) is not None:
            raise Overloaded(f"{reason}; slow down and send this one again")

    def is_full(self, owner: str) -> str | None:
        """Return why an owner's next request would be refused; None if it would not be."""
        return self._why_not(owner, 1)

    def _why_not(self, owner: str, size: int) -> str | None:
        taken = self._taken.get(owner, _Taken())
        if taken.requests >= self._max_requests:
            return (
                f"{taken.requests} sampling requests of owner {owner!r} wait already"
                f" (sampler.max_queued_requests is {self._max_requests})"
            )
        if taken.requests and taken.num_bytes + size > self._max_bytes:
            return (
                f"{taken.num_bytes} bytes of sampling requests of owner {owner!r} wait already"
                f" (limits.max_queued_bytes is {self._max_bytes})"
            )
        return None

    def enter(self, owner: str, size: int) -> None:
        """Count a request."""
        taken = self._taken.setdefault(owner, _Taken())
        taken.requests += 1
        taken.num_bytes += size

    def leave(self, owner: str, size: int) -> None:
        """Count a request no longer."""
        taken = self._taken[owner]
        taken.requests -= 1
        taken.num_bytes -= size
        if not taken.requests:
            del self._taken[owner]
