"""What heads say about their memory, and when they are asked again. Pure."""

from dataclasses import dataclass

from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_protocol.heads.launch import HeadStatus

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


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """What the memory of a head holds, by its last answer."""

    most_models: int | None
    """How many models it holds at most: those it has, and more of the size of the largest. None if
    it has had no model yet."""
    capacity: HeadCapacity | None = None
    """What it says of models of other sizes; None if it does not know the size of an adapter."""
    held: tuple[str, ...] = ()
    """Ids of its models."""

    @property
    def is_full(self) -> bool:
        """Whether it has no room for one more model of the size of the largest."""
        return self.most_models is not None and 0 < self.most_models <= len(self.held)


def head_memory(status: HeadStatus, before: HeadMemory | None) -> HeadMemory | None:
    """Return what a head says; None if it has not measured anything yet.

    Args:
        status: its answer.
        before: what was known of it. A head without models has no largest one.
    """
    capacity = status.capacity
    if capacity is None:
        return before
    # The status may count a model that is being created, which the capacity does not know yet.
    known = capacity if capacity.rank_bytes is not None else None
    if capacity.more_models is not None:
        return HeadMemory(len(capacity.held) + capacity.more_models, known, capacity.held)
    most = before.most_models if before is not None else None
    has_said = (most, known) != (None, None)
    return HeadMemory(most, known, capacity.held) if has_said else None
