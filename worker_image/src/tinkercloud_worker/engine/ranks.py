"""What a trainer is at one of several ranks that train together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tinkercloud_worker.engine.batch import TokenLimits
from tinkercloud_worker.engine.trainer import Trainer, TrainingState


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

    Only `add_model`, `forward`, `forward_backward`, `sum_gradient` and `export_gradient` need the
    other ranks, and none of these changes weights or moments. So whenever a rank dies, those that
    live hold the same state, and it is a whole one.
    """

    def membership(self) -> Membership:
        """Return what this rank is to the whole."""

    def sum_gradient(self, model_id: str) -> None:
        """Give every rank the sum of all ranks' gradients. Call it once, before optim_step."""

    def last_words(self) -> Mapping[str, TrainingState]:
        """Return the states of all models. May be called while a pass runs."""
