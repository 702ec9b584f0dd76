"""How large the pieces of a long job may be, so that owners with small requests wait briefly.

An owner whose turn it is waits for the piece that runs. While several owners use the engine, pieces
are therefore not larger than what the others send themselves; an owner alone gets the largest
ones, which compute fastest.

What an owner sends right behind a batch, such as its optimizer step, runs before the pieces of
others if the engine waits a moment for it. It does so for owners who send at once. Nothing here
knows threads.
"""

from collections.abc import Callable
from dataclasses import dataclass

_PRESENT_SECONDS = 10.0
"""How long an owner counts as present after its last job."""
_SIZE_SECONDS = 60.0
"""How long the size of an owner's largest job counts."""


@dataclass(slots=True)
class _Neighbour:
    tokens: int
    """Tokens of its largest recent job."""
    measured: float
    """When that job came."""
    seen: float
    """When its last job came."""
    batch_ended: float | None = None
    """When its last batch ended; None if it has sent something since."""
    is_prompt: bool = True
    """Whether what it last sent behind a batch came at once."""


class Neighbours:
    """The owners who use the engine, and the sizes of their jobs."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Create an empty registry.

        Args:
            now: clock, in seconds.
        """
        self._now = now
        self._owners: dict[str, _Neighbour] = {}

    def note(self, owner: str, tokens: int) -> None:
        """Record that a job of an owner waits.

        Args:
            owner: the owner.
            tokens: tokens of the job; an optimizer step, whose tokens are few, does not make an
                owner small as long as a larger job of it counts.
        """
        now = self._now()
        known = self._owners.setdefault(owner, _Neighbour(tokens, now, now))
        if tokens >= known.tokens or now - known.measured > _SIZE_SECONDS:
            known.tokens, known.measured = tokens, now
        known.seen = now

    def note_end(self, owner: str) -> None:
        """Record that a batch of an owner has ended."""
        if owner in self._owners:
            self._owners[owner].batch_ended = self._now()

    def note_sent(self, owner: str, in_time: float) -> None:
        """Record that an owner has sent a job.

        Args:
            owner: the owner.
            in_time: seconds after the end of its last batch that the engine would have waited.
        """
        known = self._owners.get(owner)
        if known is not None and known.batch_ended is not None:
            known.is_prompt = self._now() - known.batch_ended <= in_time
            known.batch_ended = None

    def is_prompt(self, owner: str) -> bool:
        """Whether others use the engine too, and this owner sends the next job at once."""
        known = self._owners.get(owner)
        return known is not None and known.is_prompt and self.most_tokens(owner) is not None

    def most_tokens(self, owner: str) -> int | None:
        """Return how many tokens a piece of an owner's job should have; None: as many as it likes.

        Smaller pieces than the device computes well hardly take less time: the trainer knows those.
        """
        now = self._now()
        self._owners = {
            name: known
            for name, known in self._owners.items()
            if now - known.seen <= _PRESENT_SECONDS
        }
        sizes = [known.tokens for name, known in self._owners.items() if name != owner]
        return min(sizes, default=None)
