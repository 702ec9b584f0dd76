"""What a trainer is at one of several ranks that train together."""

from dataclasses import dataclass
from typing import Protocol

from tinkercloud_worker.engine.batch import TokenLimits
from tinkercloud_worker.engine.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Membership:
    """What a rank's trainer is to the whole."""

    limits: TokenLimits
    replica: int
    """Which replica of the model it is part of, from 0."""
    answers: bool
    """Whether it is the rank that returns the results of its replica."""


class RankTrainer(Trainer, Protocol):
    """A rank's part of a trainer: every rank gets the same calls in the same order.

    Passes get the share of the rank's replica, and their results count at the rank that answers.
    What other methods return counts at rank 0. What they raise, all ranks raise alike.
    """

    def membership(self) -> Membership:
        """Return what this rank is to the whole."""
