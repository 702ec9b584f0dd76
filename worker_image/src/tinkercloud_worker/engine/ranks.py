"""What a trainer is at one of several ranks that train together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tinkercloud_worker.engine.batch import TokenLimits
from tinkercloud_worker.engine.trainer import Trainer, TrainingState, WeightsSnapshot


@dataclass(frozen=True, slots=True)
class Membership:
    """What a rank's trainer is to the whole."""

    limits: TokenLimits
    replica: int
    """Which replica of the model it is part of, from 0."""
    answers: bool
    """Whether it is the rank that returns the results of its replica."""
    multiple: int = 1
    """Of positions that each example is computed as."""


class RankTrainer(Trainer, Protocol):
    """A rank's part of a trainer: every rank gets the same calls in the same order.

    Passes get the share of the rank's replica, and their results count at the rank that answers.
    What other methods return counts at rank 0. What they raise, all ranks raise alike.

    `optim_step`, `discard_gradient`, `import_state`, `import_gradient` and `remove_model` need no
    other rank, and nothing else changes weights or moments. So whenever a rank dies, those that
    live agree on the state: of a model that is whole at each of them they all hold it, and a model
    of which each holds a part (`Parts`) is lost.
    """

    def membership(self) -> Membership:
        """Return what this rank is to the whole."""

    def sum_gradient(self, model_id: str) -> None:
        """Give every rank the sum of all ranks' gradients. Call it once, before optim_step."""

    def published(self, model_id: str) -> WeightsSnapshot:
        """Return a copy of the current weights, as passes see them; see `Trainer.publication`."""

    def salvage(self) -> Mapping[str, TrainingState]:
        """Return the states of all models that are whole here. May be called while a pass runs."""


class Parts(Protocol):
    """How a model under training lies over ranks that each hold a part of it.

    Each rank has the tensors of its part, with a gradient and moments, under names of its own.
    Whole tensors have the Hugging Face model's names and shapes.
    """

    is_whole: bool
    """Whether each rank's part is all of the model."""

    def gather(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return a copy of whole tensors, on the CPU, at rank 0; nothing at the others.

        It is rounded to a dtype, before anything of it is sent.

        All ranks call it together, each with its part: weights, or moments or gradients of those.
        If the model is whole at each rank, each may call it alone and gets the whole.
        """

    def cut(self, tensors: Mapping[str, Tensor], what: str) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of whole tensors, each by its name here. Needs no other rank.

        What is copied for it is one tensor at a time.

        Raises:
            InvalidRequest: names or shapes are not this model's; `what` says whose they are. It is
                raised before anything is yielded.
        """

    def add_up(self, gradient: Tensor) -> None:
        """Turn ranks' contributions to a flat gradient into parts of their sum, all together."""

    def contribute(self, gradient: Tensor) -> None:
        """Turn parts of a sum into contributions that `add_up` makes the same sum of."""

    def norm(self, gradient: Tensor) -> float:
        """Return the norm of a whole summed gradient, given the parts, at all ranks together."""
