"""The interface of a trainer at one of several ranks that train together."""

from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_worker.engine.batch import ModelLimits
from tinkercloud_worker.engine.memory_report import MemoryReport
from tinkercloud_worker.engine.tensor_slices import Piece
from tinkercloud_worker.engine.trainer import (
    DirectTrainer,
    LossOutput,
    OptimizerStep,
    TrainingPass,
    TrainingState,
)


@dataclass(frozen=True, slots=True)
class Membership:
    """A rank's place in the group."""

    limits: ModelLimits
    replica: int
    """Index of the model replica that it is part of, from 0."""
    answers: bool
    """Whether this rank returns the results of its replica."""
    base_fingerprint: str | None = None
    """Fingerprint of the base model that it has loaded; None if another rank has read it."""
    reads_images: bool = False
    """See `Trainer.reads_images`."""
    pad_to_multiple_of: int = 1
    """Number of tokens; each example is padded to a multiple of it."""
    max_shared_tokens: int = 0
    """Maximum tokens of a micro-batch that several models share at this rank.

    0: none share one. Other values are for a `SharingRank`.
    """
    efficient_tokens: int = 1
    """Tokens of a micro-batch at this rank below which fewer take hardly less time."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What an exported model has in addition to tensors."""

    lora: LoraConfig | None
    """Configuration of the adapter; None for all weights of a fully fine-tuned model."""
    step: int
    """Number of optimizer steps."""
    shared_bytes: int
    """Bytes of the pieces that the rank has yielded."""


Share: TypeAlias = Generator[Sequence[Piece], None, Outline]
"""What one rank contributes to a copy of a model.

The pieces of all ranks have every element of the full tensors once. Values may be those of the
model itself: copy what is yielded before the next value is requested.
"""


class SharedPassFailed(WireError):
    """A replica could not compute a shared pass; every rank has the gradients from before it."""


class RankTrainer(DirectTrainer, Protocol):
    """A rank's part of a trainer: every rank gets the same calls in the same order.

    Passes receive the batch shard of the rank's replica, and their result is taken from the rank
    that answers. A model is exported in shares, one of each rank; the exports of `ModelHolder` need
    a rank that has all of the model. The results of other methods are taken from rank 0. Errors of
    the client are raised by all ranks alike.

    `optim_step`, `discard_gradient`, `import_state`, `import_gradient`, `remove_model`, `memory`,
    `page_out` and `page_in` need no other rank, and nothing else changes weights or moments. So the
    ranks that survive the death of another agree on the state: each has all models that are not
    sharded, and sharded models (`Sharding`) are lost.
    """

    def membership(self) -> Membership:
        """Return this rank's place in the group."""

    def memory(self) -> MemoryReport:
        """Return what the memory of this rank's device holds."""

    def adapter_size(self, lora_config: LoraConfig) -> int:
        """Return the number of parameters that such an adapter has at this rank.

        Raises:
            InvalidRequest: the base model does not support the configuration.
        """

    def page_out(self, model_ids: Sequence[str]) -> MemoryReport:
        """Page adapters out in this order, as far as there is room for them; return what is left.

        Nothing else pages adapters: other calls are only for those that are here, except exports,
        `salvage`, `discard_gradient` and `remove_model`.
        """

    def page_in(self, model_ids: Sequence[str]) -> MemoryReport:
        """Page adapters in, as far as memory can be allocated; return what is there then."""

    def sum_gradient(self, model_id: str) -> None:
        """Sum the gradients of all ranks, at every rank. Call it once, before optim_step."""

    def sum_gradients(self, model_ids: Sequence[str]) -> None:
        """Sum the gradients of several models; call it once, before optim_steps."""

    def optim_steps(self, steps: Sequence[OptimizerStep]) -> Sequence[Mapping[str, float]]:
        """Apply the summed gradients of several models as one update; needs no other rank.

        Raises:
            InvalidRequest: a gradient is not finite. No model has changed, and the sums are
                turned back into per-rank parts, so that the call can be repeated.
        """

    def share_weights(self, model_id: str) -> Share:
        """Yield this rank's share of the weights, in float32."""

    def share_published(self, model_id: str) -> Share:
        """Yield its share of the weights in the compute dtype; see `Trainer.publication`."""

    def share_state(self, model_id: str) -> Share:
        """Yield its share of weights and moments, which have the names of a `TrainingState`."""

    def share_gradient(self, model_id: str) -> Share:
        """Yield its share of the summed gradient; the ranks' own gradients are unchanged.

        Only this share needs other ranks.
        """

    def salvage(self) -> Mapping[str, TrainingState]:
        """Return the states of all models that are not sharded. May be called during a pass."""


class SharingRank(RankTrainer, Protocol):
    """A rank's trainer that can run passes of several models as one.

    Ranks that need no other during a pass agree at its end whether all have succeeded. Where ranks
    need each other, one that fails cannot report it to those that wait for it. So a failure loses
    the group, as in a pass of one model; models without an earlier gradient have then lost nothing.
    """

    def shared_pass(self, items: Sequence[TrainingPass]) -> Sequence[LossOutput]:
        """Run one micro-batch that adapters share; the batches of some may be empty here.

        It is called at all ranks with the same models in the same order, and only if
        `Membership.max_shared_tokens` allows it. A rank that others need runs the same collective
        operations whichever examples it has, also if it has none, and raises no client error,
        because others might not raise it.

        Raises:
            SharedPassFailed: at ranks that need no other, and at all of them alike, if one could
                not compute it. All gradients are those from before.
        """


@contextmanager
def client_errors_lose_the_group() -> Iterator[None]:
    """Turn a client error at a rank that others need into one that loses the group.

    To the group, a client error means that no rank waits for another.

    Raises:
        RuntimeError: instead of a client error.
    """
    try:
        yield
    except WireError as error:
        raise RuntimeError(f"a shared pass was rejected at this rank: {error}") from error


class Sharding(Protocol):
    """How a model under training is divided over ranks.

    Each rank has the tensors of its part, with gradient and moments, under rank-specific names.
    Full tensors have the names and shapes of the Hugging Face model.
    """

    is_whole: bool
    """Whether each rank has all of the model."""

    shared: Set[str]
    """Rank-specific names of the tensors that this rank contributes to exports.

    Of ranks with the same tensor, only one contributes it."""

    def pieces(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[Piece]:
        """Yield the pieces of full tensors that some of this rank's tensors are.

        Needs no other rank, and no memory of the device.

        Args:
            tensors: weights, moments or gradients by rank-specific name.
            dtype: to which values are rounded.
        """

    def shard(self, tensors: Mapping[str, Tensor], what: str) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of full tensors, by rank-specific name. Needs no other rank.

        At most one tensor is copied at a time.

        Args:
            tensors: the full tensors.
            what: describes them in messages, such as "checkpoint".

        Raises:
            InvalidRequest: names or shapes do not match the model. It is raised before anything
                is yielded.
        """

    def reduce_gradient(self, gradient: Tensor) -> None:
        """Sum the flat gradients of all ranks in place; each keeps its part. Collective."""

    def unreduce_gradient(self, gradient: Tensor) -> None:
        """Invert `reduce_gradient`: turn parts of a sum into gradients with the same sum."""

    def grad_norm(self, gradient: Tensor) -> float:
        """Return the norm of the full summed gradient from its parts. Collective."""
