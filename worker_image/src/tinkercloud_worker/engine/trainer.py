"""What a trainer does: several models over one shared base, each with its own gradient and moments.

All calls come from one thread, in an order the head has decided. None may be interrupted, except
that forward and forward_backward call `yield_point` at points where the base model is free for
sampling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from torch import Tensor

from tinkercloud_protocol.errors import WireError
from tinkercloud_protocol.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.tensors import FloatArray
from tinkercloud_worker.engine.batch import Batch, TokenLimits
from tinkercloud_worker.engine.expert_load import TokenCounts
from tinkercloud_worker.engine.thread import Batcher


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """Result of a pass: per example the logprobs of its targets, [N] or [N, K], and metrics."""

    logprobs: Sequence[FloatArray]
    metrics: Mapping[str, float]
    """Sums. Keys end in `:sum`, by which the SDK folds the chunks of one call."""
    expert_tokens: TokenCounts | None = None
    """What experts were sent; None of models without, or whose experts are not counted."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightsSnapshot:
    """A model's weights at one moment; later training does not change it.

    Exactly one kind: an adapter (`lora` is set) or all weights of a fully fine-tuned model.
    `tensors` are named as in the Hugging Face model, without PEFT's prefix. They are float32, but
    for whole models that are only sampled from: those may have the dtype of passes.
    """

    lora: LoraConfig | None
    tensors: Mapping[str, Tensor]

    @property
    def size_bytes(self) -> int:
        """Memory it holds."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class RemoteModel(Protocol):
    """All weights of a fully fine-tuned model, as files on the machine of a trainer's first rank.

    They are in the form that inference servers read. Methods block.
    """

    name: str
    """Of the files; no other weights ever have it."""
    size_bytes: int
    """Of the weights."""
    tensor_names: Sequence[str]
    """As in the files."""

    def fetch(self, folder: Path) -> None:
        """Copy the files to a folder of this machine, unless it exists.

        Raises:
            NotFound: they are gone.
        """

    def remove(self) -> None:
        """Remove them. They may be gone."""


Publication: TypeAlias = WeightsSnapshot | RemoteModel
"""A model's weights at one moment, for samplers."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """Everything that training continues from."""

    weights: WeightsSnapshot
    moments: Mapping[str, Tensor] | None
    """AdamW's moments, float32: `<weight name>.exp_avg` and `<weight name>.exp_avg_sq`."""
    step: int
    """Optimizer steps taken; what AdamW's bias correction counts."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingPass:
    """A batch that is to be added to a model's gradient."""

    model_id: str
    batch: Batch


Gradient = Mapping[str, Tensor]
"""An accumulated gradient, float32, named like the weights."""


class GradientLost(WireError):
    """A part of a gradient is gone, and so all of it; weights and moments are as they were."""


class Trainer(Protocol):
    """Trains models of one base. Methods raise InvalidRequest for what the client got wrong."""

    limits: TokenLimits
    base_fingerprint: str | None
    """Fingerprint of the loaded base model (`fingerprint`); None if none is loaded."""

    @property
    def batcher(self) -> "Batcher[TrainingPass, LossOutput] | None":
        """Runs queued passes of several models as one job; None if each pass runs by itself."""

    def add_model(self, model_id: str, lora_config: LoraConfig | None) -> None:
        """Begin a model from the base's weights, with no gradient and no moments.

        Raises:
            InvalidRequest: the configuration does not fit this base model.
        """

    def remove_model(self, model_id: str) -> None:
        """Forget a model and free its memory. Unknown ids are fine."""

    def memory_bytes(self, model_id: str) -> int:
        """Return the bytes that a model takes in this process: weights, gradient and moments.

        0 for an unknown one, and for one that other processes hold. May be called on any thread.
        """

    def forward(self, model_id: str, batch: Batch, yield_point: Callable[[], None]) -> LossOutput:
        """Compute logprobs and loss; change nothing."""

    def forward_backward(
        self, model_id: str, batch: Batch, yield_point: Callable[[], None]
    ) -> LossOutput:
        """Compute logprobs and loss, and add the loss's gradient to the model's."""

    def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        """Clip and apply the accumulated gradient, then zero it; return metrics.

        Raises:
            InvalidRequest: the gradient is not finite. Nothing was applied and it is zeroed.
        """

    def discard_gradient(self, model_id: str) -> None:
        """Zero the accumulated gradient."""

    def release_memory(self) -> None:
        """Free GPU memory that is cached for later passes: other processes share the GPU."""

    def stop_waiting(self) -> None:
        """Have calls fail that wait for other processes to start, from now on.

        Models can still be exported, and do not wait behind such a call. May be called on any
        thread, unlike all else here.
        """

    def snapshot(self, model_id: str) -> WeightsSnapshot:
        """Return a copy of the current weights."""

    def publication(self, model_id: str) -> Callable[[], Publication]:
        """Take the current weights for samplers.

        A whole model is rounded to the dtype that passes compute in.

        Returns:
            A callable that stores the weights where samplers read them, and returns them. Call it
            once, on any thread; the trainer may get other calls meanwhile. It raises Unavailable if
            the weights were lost before.
        """

    def export_state(self, model_id: str) -> TrainingState:
        """Return a copy of the weights, moments and step."""

    def import_state(self, model_id: str, state: TrainingState) -> None:
        """Replace the weights; also moments and step if the state has moments, else reset them.

        The accumulated gradient is zeroed.

        Raises:
            InvalidRequest: the state's names or shapes are not this model's.
        """

    def export_gradient(self, model_id: str) -> Gradient | None:
        """Return a copy of the accumulated gradient; None if there is none.

        Raises:
            GradientLost: there was one.
        """

    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """Replace the accumulated gradient.

        Raises:
            InvalidRequest: the names or shapes are not this model's.
        """
