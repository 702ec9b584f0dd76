"""The interface of a trainer: several models over one base, each with its gradient and moments.

All calls come from one thread, in an order that the head decides. Calls are not interrupted, except
that the pieces of a pass end wherever the base model is free for sampling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from torch import Tensor

from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.requests.tensors import FloatArray
from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_worker.engine.batch import Batch, ModelLimits
from tinkercloud_worker.engine.expert_load import TokenCounts
from tinkercloud_worker.engine.turns.engine_thread import Batcher

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """Result of a pass: logprobs of the targets of each example, [N] or [N, K], and metrics."""

    logprobs: Sequence[FloatArray]
    metrics: Mapping[str, float]
    """Sums. Keys end in `:sum`, so that the SDK adds up the chunks of one call."""
    expert_tokens: TokenCounts | None = None
    """Tokens routed to each expert; None if the model has no experts, or they are not counted."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightsCopy:
    """A copy of a model's weights, which later training does not change.

    It is either an adapter (`lora` is set) or all weights of a fully fine-tuned model. `tensors`
    have the names of the Hugging Face model, without PEFT's prefix. They are float32, except for
    fully fine-tuned models that are only sampled from: those may have the compute dtype.
    """

    lora: LoraConfig | None
    tensors: Mapping[str, Tensor]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class RemoteModel(Protocol):
    """All weights of a fully fine-tuned model, as files on the machine of a trainer's rank 0.

    The files have the format that inference servers read. Methods block.
    """

    name: str
    """Unique name of the files, never used again."""
    size_bytes: int
    """Size of the weights."""
    tensor_names: Sequence[str]
    """Names of the tensors in the files."""

    def fetch(self, folder: Path) -> None:
        """Copy the files to a folder on this machine, unless the folder exists.

        Raises:
            NotFound: the files are gone.
        """

    def remove(self) -> None:
        """Remove the files, which may be gone already."""


Publication: TypeAlias = WeightsCopy | RemoteModel
"""A copy of a model's weights for samplers."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """Everything that training continues from."""

    weights: WeightsCopy
    moments: Mapping[str, Tensor] | None
    """AdamW's moments, float32: `<weight name>.exp_avg` and `<weight name>.exp_avg_sq`."""
    step: int
    """Number of optimizer steps, as used by AdamW's bias correction."""

    @property
    def size_bytes(self) -> int:
        """Size of all tensors together."""
        moments = (self.moments or {}).values()
        return self.weights.size_bytes + sum(tensor.nbytes for tensor in moments)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingPass:
    """A batch, whose gradient is added to a model's gradient unless it is forward only."""

    model_id: str
    batch: Batch


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStep:
    """A queued `optim_step`."""

    model_id: str
    params: AdamParams


Gradient = Mapping[str, Tensor]
"""An accumulated gradient: float32 tensors with the names of the weights."""


class GradientLost(WireError):
    """The accumulated gradient was lost; weights and moments are unchanged."""


class ModelHolder(Protocol):
    """Holds models of one base under training. Methods raise InvalidRequest for client errors."""

    limits: ModelLimits
    base_fingerprint: str | None
    """Fingerprint of the loaded base model (`fingerprint`); None if none is loaded."""
    reads_images: bool
    """Whether the examples of a pass may have images."""

    @property
    def capacity(self) -> HeadCapacity | None:
        """How many models fit, by what was measured; None where that is unknown.

        May be read on any thread.
        """

    def add_model(self, model_id: str, lora_config: LoraConfig | None) -> None:
        """Create a model from the base weights, without gradient and moments.

        Raises:
            InvalidRequest: the base model does not support the configuration.
        """

    def remove_model(self, model_id: str) -> None:
        """Remove a model, which may be unknown, and free its memory."""

    def memory_bytes(self, model_id: str) -> int:
        """Return the bytes that a model takes on its device: weights, gradient and moments.

        With several ranks it is the most at one of them, with moments that it does not have yet. 0
        for an unknown model and for one that was paged out. May be called on any thread.
        """

    def discard_gradient(self, model_id: str) -> None:
        """Zero the accumulated gradient."""

    def release_memory(self) -> None:
        """Free cached GPU memory for other processes that share the GPU."""

    def stop_waiting(self) -> None:
        """Make calls fail, from now on, that wait for other processes to start.

        Models can still be exported, without waiting for such a call. Unlike the other methods,
        this may be called on any thread.
        """

    def copy_weights(self, model_id: str) -> WeightsCopy:
        """Return a copy of the current weights."""

    def publication(self, model_id: str) -> Callable[[], Publication]:
        """Copy the current weights for samplers.

        A fully fine-tuned model is rounded to the compute dtype.

        Returns:
            A callable that stores the weights where samplers read them, and returns them. Call it
            once, on any thread; the trainer accepts other calls meanwhile. It raises Unavailable
            if the weights were lost.
        """

    def export_state(self, model_id: str) -> TrainingState:
        """Return a copy of the weights, moments and step."""

    def begin_export(self, model_id: str) -> Callable[[], TrainingState]:
        """Begin to copy the weights, moments and step; later calls do not change the copy.

        Returns:
            A callable that waits for the copy and returns it. It may be called on any thread, once.
        """

    def begin_reading(self, model_id: str, read: Callable[[TrainingState], T]) -> Callable[[], T]:
        """Let a function read the weights, moments and step themselves, before they change.

        Where this process has the model, no memory is taken for a copy; a step of this model
        that comes before the function has returned waits for it, and so do all later calls of the
        trainer. Elsewhere the function gets a copy.

        Returns:
            A callable that calls the function, unless a step had to, and returns its result. It may
            be called on any thread, once.
        """

    def import_state(self, model_id: str, state: TrainingState) -> None:
        """Replace the weights; replace moments and step too, or reset them if the state has none.

        The accumulated gradient is zeroed.

        Raises:
            InvalidRequest: names or shapes in the state do not match the model.
        """

    def export_gradient(self, model_id: str) -> Gradient | None:
        """Return a copy of the accumulated gradient; None if there is none.

        Raises:
            GradientLost: it was lost.
        """

    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """Replace the accumulated gradient.

        Raises:
            InvalidRequest: names or shapes do not match the model.
        """


class Trainer(ModelHolder, Protocol):
    """Trains models of one base; the head runs passes and steps through the engine thread."""

    @property
    def batcher(self) -> Batcher[TrainingPass, LossOutput]:
        """Runs queued passes, some of several models as one job, and long ones in pieces."""

    @property
    def stepper(self) -> Batcher[OptimizerStep, Mapping[str, float]]:
        """Runs queued optimizer steps, those of several models as one update."""


class DirectTrainer(ModelHolder, Protocol):
    """Computes for one model at a time, at once: what ranks do, on behalf of a `Trainer`."""

    def forward(self, model_id: str, batch: Batch) -> LossOutput:
        """Compute logprobs and loss without changing anything."""

    def forward_backward(self, model_id: str, batch: Batch) -> LossOutput:
        """Compute logprobs and loss, and add the gradient of the loss to the model's."""

    def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        """Clip and apply the accumulated gradient, then zero it; return metrics.

        Raises:
            InvalidRequest: the gradient is not finite. It is zeroed without being applied.
        """
