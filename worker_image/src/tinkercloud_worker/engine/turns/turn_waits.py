"""How long requests wait for their turns on the engine's thread, for their traces.

A request that wants to know it collects the time in the context of its task.
"""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class TurnWait:
    """The time that a request has waited for its turns."""

    seconds: float = 0.0


_COLLECTED: ContextVar[TurnWait | None] = ContextVar("turn_waits", default=None)


def collect() -> TurnWait:
    """Return what gets the time that this task, and those that it starts, wait from now on."""
    wait = TurnWait()
    _COLLECTED.set(wait)
    return wait


def note(seconds: float) -> None:
    """Record that a job of this task has waited."""
    if (wait := _COLLECTED.get()) is not None:
        wait.seconds += seconds
