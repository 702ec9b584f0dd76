"""When ranks ran the commands of requests, for the traces of these.

A request that wants to know it collects them in the context of its task. The engine thread, where
its commands run, serves one or, in a shared pass, several requests at a time.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

MOST_TIMES = 128
"""Times that a request collects: a batch in many pieces has many commands."""


@dataclass(frozen=True, slots=True)
class RankTime:
    """When a rank ran a command, in seconds from 1970-01-01 in UTC of the clock of its node."""

    command: str
    rank: int
    started: float
    finished: float


RankTimes = list[RankTime]

_COLLECTED: ContextVar[RankTimes | None] = ContextVar("rank_times", default=None)
_SERVED = threading.local()


def collect() -> RankTimes:
    """Return a list that gets the times of what this task, and those that it starts, sends on."""
    times: RankTimes = []
    _COLLECTED.set(times)
    return times


def stop() -> None:
    """Collect no further times in this task."""
    _COLLECTED.set(None)


def collected() -> RankTimes | None:
    """Return where this task collects times; None if it does not."""
    return _COLLECTED.get()


@contextmanager
def serving(requests: Iterable[RankTimes | None]) -> Iterator[None]:
    """Count commands of this thread within the context for these requests alone, by their lists."""
    before = _served()
    _SERVED.times = [times for times in requests if times is not None]
    try:
        yield
    finally:
        _SERVED.times = before


def _served() -> list[RankTimes]:
    return getattr(_SERVED, "times", [])


def note(command: str, times: Sequence[tuple[float, float]]) -> None:
    """Record a command of this thread: of rank 0, and of the rank that took longest.

    Args:
        command: its name.
        times: when each rank started and finished it.
    """
    collecting = _served()
    if not collecting:
        return
    slowest = max(range(len(times)), key=lambda rank: times[rank][1] - times[rank][0])
    noted = [RankTime(command, rank, *times[rank]) for rank in sorted({0, slowest})]
    for each in collecting:
        each.extend(noted[: MOST_TIMES - len(each)])
