"""When heads are asked again what their memory holds. Pure."""

from dataclasses import dataclass

ASK_AGAIN_SECONDS = 15.0
"""Age at which an answer is asked for again, while a session waits or may be moved."""
_LONGEST_PAUSE_SECONDS = 240.0
"""Longest time until a silent head is asked again: the pause doubles with each failure."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The last request to a head that has ended. Times are in seconds of any one clock."""

    at: float = float("-inf")
    """When its answer came, or failed to come."""
    failures: int = 0
    """How often the head has not answered since its last answer."""

    @property
    def is_silent(self) -> bool:
        """Whether the head did not answer: others do not wait for its next answer."""
        return self.failures > 0

    def is_due(self, now: float) -> bool:
        """Return whether the head is to be asked again."""
        pause = min(ASK_AGAIN_SECONDS * 2.0 ** min(self.failures, 10), _LONGEST_PAUSE_SECONDS)
        return now - self.at >= pause

    def answered(self, now: float) -> "Asked":
        """Return what is known once the head has answered."""
        return Asked(now)

    def failed(self, now: float) -> "Asked":
        """Return what is known once the head has not answered another request."""
        return Asked(now, self.failures + 1)
