"""Measures how long requests of a model wait because of their owner."""

from collections.abc import Callable
from time import monotonic


class OwnerPauses:
    """The pauses of one queue: its owner has unread results, or has used its tokens."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Start without a pause.

        Args:
            clock: a monotonic clock, in seconds.
        """
        self._clock = clock
        self._since: float | None = None
        self._last = 0.0

    def note(self, *, is_paused: bool) -> None:
        """Record whether the next request is paused now. Call it before each one starts."""
        moment = self._clock()
        if not is_paused:
            self._last = 0.0 if self._since is None else moment - self._since
            self._since = None
        elif self._since is None:
            self._since = moment

    def seconds_before(self) -> float:
        """Return how long the request that has just started was paused."""
        return self._last
