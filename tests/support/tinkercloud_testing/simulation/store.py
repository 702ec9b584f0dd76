"""The checkpoint store of a simulation, and the record of where each run's steps are.

Steps are what clients got an answer for. A head holds them in memory, a pod's disk has them if the
head keeps journals, and the store has what was saved.
"""

from dataclasses import dataclass, field


class StoreAway(Exception):
    """The checkpoint store does not respond."""


@dataclass
class Store:
    """What heads have saved."""

    is_away: bool = False
    steps: dict[str, int] = field(default_factory=dict)
    """By run: the steps in its saved state."""
    checkpoints: dict[str, int] = field(default_factory=dict)
    """By run: the steps in its last checkpoint."""
    claims: dict[str, str] = field(default_factory=dict)
    """By run: the incarnation of the head that loaded it last, whose saves count."""
    away_until: float = 0.0
    """Until when it was away at last."""
    excuses: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By run: how many steps were destroyed with the last copy, and by what."""

    def check(self) -> None:
        """Raise StoreAway if it does not respond."""
        if self.is_away:
            raise StoreAway("the store s3://runs does not respond")

    def save(self, run: str, steps: int, incarnation: str) -> None:
        """Save the state of a run, unless another head has loaded it since.

        Raises:
            StoreAway: it does not respond.
        """
        self.check()
        if self.claims.get(run, incarnation) == incarnation:
            self.steps[run] = max(steps, self.steps.get(run, 0))

    def load(self, run: str, incarnation: str) -> int:
        """Return the saved steps of a run; the head that loads it is the only one that saves it.

        Raises:
            StoreAway: it does not respond.
        """
        self.check()
        self.claims[run] = incarnation
        return self.steps.get(run, 0)

    def note_destroyed(self, run: str, steps: int, cause: str) -> None:
        """Record that the last copy of some steps was destroyed by what nothing survives."""
        if steps > self.steps.get(run, 0):
            self.excuses[run] = (steps, cause)

    def excuse(self, run: str, lost: int) -> str | None:
        """Return what destroyed the steps of a run up to this one; None if nothing did."""
        steps, cause = self.excuses.get(run, (0, ""))
        return cause if steps >= lost else None
