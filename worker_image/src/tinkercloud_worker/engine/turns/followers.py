"""Whose requests the engine waits for after a pass that several models shared.

Their next requests are at the head already, and reach the engine one after another, within a few
milliseconds. Without a wait the first of them would run alone. A model whose request came late is
not waited for again until one comes in time. Nothing here knows threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinkercloud_worker.engine.turns.fair_queue import Share

_REMEMBERED_SECONDS = 10.0
"""How long a model is remembered after its last shared pass."""


@dataclass(slots=True)
class _Follower:
    ended: float
    """When the last pass ended that its request follows."""
    until: float
    """Until when that request comes in time."""
    has_come: bool = False
    """Whether that request has come."""
    is_prompt: bool = True
    """Whether the last one that has come was in time."""


class Followers:
    """The models that share passes, and those of the last pass that are waited for."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Know no models.

        Args:
            now: clock, in seconds.
        """
        self._now = now
        self._models: dict[tuple[str, str], _Follower] = {}
        """By owner and model."""
        self._awaited: set[tuple[str, str]] = set()
        self._until = 0.0
        self.owners: frozenset[str] = frozenset()
        """The owners who took part in the last pass."""

    def note_pass(self, shares: Sequence[Share], followed: Sequence[Share], in_time: float) -> None:
        """Record that a pass of several models has ended, and wait for those that follow it.

        Args:
            shares: all shares of the pass.
            followed: those of models whose next requests are known to follow.
            in_time: seconds within which these should come.
        """
        now = self._now()
        self._models = {
            key: known
            for key, known in self._models.items()
            if now - known.ended <= _REMEMBERED_SECONDS
        }
        self.owners = frozenset(share.owner for share in shares)
        self._until = now + in_time
        self._awaited = set()
        for share in followed:
            key = (share.owner, share.model)
            known = self._models.get(key)
            is_prompt = known is None or known.is_prompt
            self._models[key] = _Follower(now, self._until, is_prompt=is_prompt)
            if is_prompt:
                self._awaited.add(key)

    def note_sent(self, owner: str, model: str) -> None:
        """Record that a request of a model has come."""
        self._awaited.discard((owner, model))
        known = self._models.get((owner, model))
        if known is not None and not known.has_come:
            known.has_come = True
            known.is_prompt = self._now() <= known.until

    def seconds_left(self) -> float:
        """Return how long to wait; 0 if no request is pending."""
        if self._awaited and self._now() >= self._until:
            self.stop()
        return self._until - self._now() if self._awaited else 0.0

    @property
    def have_come(self) -> bool:
        """Whether no request is pending."""
        return not self._awaited

    def stop(self) -> None:
        """Stop waiting, because something else runs or it took too long."""
        self._awaited = set()
