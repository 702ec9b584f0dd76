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
    """A rank's place in the group."""

    limits: TokenLimits
    replica: int
    """Which replica of the model it is part of, from 0."""
    answers: bool
    """Whether it is the rank that returns the results of its replica."""
    base_fingerprint: str | None = None
    """Of the base model that it has loaded; None where another rank has read it."""
    pad_to_multiple_of: int = 1
    """Each example is padded to a multiple of this many tokens."""


class RankTrainer(Trainer, Protocol):
    """A rank's part of a trainer: every rank gets the same calls in the same order.

    Passes get the share of the rank's replica, and their results count at the rank that answers.
    What other methods return counts at rank 0. What they raise, all ranks raise alike.

    `optim_step`, `discard_gradient`, `import_state`, `import_gradient` and `remove_model` need no
    other rank, and nothing else changes weights or moments. So whenever a rank dies, those that
    live agree on the state: of a model that is whole at each of them they all hold it, and a model
    of which each holds a part (`Sharding`) is lost.
    """

    def membership(self) -> Membership:
        """Return this rank's place in the group."""

    def sum_gradient(self, model_id: str) -> None:
        """Give every rank the sum of all ranks' gradients. Call it once, before optim_step."""

    def published(self, model_id: str) -> WeightsSnapshot:
        """Return a copy of the current weights, as passes see them; see `Trainer.publication`."""

    def salvage(self) -> Mapping[str, TrainingState]:
        """Return the states of all models that are whole here. May be called while a pass runs."""


class Sharding(Protocol):
    """How a model under training is divided over ranks.

    Each rank has the tensors of its part, with a gradient and moments, under names of its own.
    Whole tensors have the Hugging Face model's names and shapes.
    """

    is_whole: bool
    """Whether each rank's part is all of the model."""

    def gather(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return a copy of the whole tensors, on the CPU, at rank 0; nothing at the others.

        All ranks call it together, each with its part: weights, or moments or gradients of those.
        If the model is whole at each rank, each may call it alone and gets the whole.

        Args:
            tensors: this rank's part, by its names here.
            dtype: of the copy; parts are rounded before they are sent.
        """

    def shard(self, tensors: Mapping[str, Tensor], what: str) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of whole tensors, each by its name here. Needs no other rank.

        At most one tensor is copied at a time.

        Args:
            tensors: the whole ones.
            what: names them in messages, such as "checkpoint".

        Raises:
            InvalidRequest: names or shapes are not this model's. It is raised before anything is
                yielded.
        """

    def reduce_gradient(self, gradient: Tensor) -> None:
        """Sum the ranks' flat gradients in place, at all ranks together; each keeps its part."""

    def unreduce_gradient(self, gradient: Tensor) -> None:
        """Turn parts of a sum into gradients that `reduce_gradient` makes the same sum of."""

    def grad_norm(self, gradient: Tensor) -> float:
        """Return the norm of the whole summed gradient, given the parts, at all ranks together."""
