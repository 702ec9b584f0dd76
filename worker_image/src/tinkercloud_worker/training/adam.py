"""Models under training as flat vectors, with their optimizer.

All trainers share this module, regardless of how they compute gradients: a model is a `Trainable`
and its AdamW, whose state is two flat moments and a step count.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw
from typing_extensions import override

from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.engine.batch import ModelLimits
from tinkercloud_worker.engine.trainer import (
    Gradient,
    ModelHolder,
    OptimizerStep,
    TrainingState,
    WeightsCopy,
)
from tinkercloud_worker.engine.turns.engine_thread import Batcher, PieceLimit, Pieces
from tinkercloud_worker.lora.parameters import is_zero, norm_of
from tinkercloud_worker.training.device_memory import DeviceMemory
from tinkercloud_worker.training.paging import Models
from tinkercloud_worker.training.trained_model import MOMENTS, TrainedModel

T = TypeVar("T")

_PART = 1 << 24
"""Elements of a vector copied at a time."""


class AdamTrainer(ModelHolder, ABC):
    """The part of a trainer that does not run the model."""

    def __init__(
        self,
        limits: ModelLimits,
        dtype: torch.dtype = torch.float32,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Create a trainer without models.

        Args:
            limits: the token limits of examples.
            dtype: the dtype of passes, which is the base's.
            memory: the memory of the models' device; None: it is not limited.
        """
        self.limits = limits
        self.base_fingerprint: str | None = None
        self.reads_images = False
        self._dtype = dtype
        self._memory = memory if memory is not None else DeviceMemory()
        self._models = self._memory.models
        self._stepper = _Stepper(self, self._models)

    @property
    @override
    def capacity(self) -> HeadCapacity | None:
        return self._memory.capacity

    @abstractmethod
    def _new_model(self, lora_config: LoraConfig | None) -> TrainedModel:
        """Return a model initialized from the base's weights."""

    @override
    def add_model(self, model_id: str, lora_config: LoraConfig | None) -> None:
        self._models[model_id] = self._new_model(lora_config)
        self._memory.determine()

    @override
    def remove_model(self, model_id: str) -> None:
        self._models.discard(model_id)
        self._memory.determine()

    @override
    def memory_bytes(self, model_id: str) -> int:
        return self._models.memory_bytes(model_id)

    @property
    def stepper(self) -> Batcher[OptimizerStep, Mapping[str, float]]:
        """See `Trainer.stepper`."""
        return self._stepper

    def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        """See `DirectTrainer.optim_step`."""
        model = self._models[model_id]
        try:
            (metrics,) = _apply_steps([(model, params)])
        except InvalidRequest:
            model.trainable.gradient.zero_()
            raise
        return metrics

    @override
    def discard_gradient(self, model_id: str) -> None:
        self._models.discard_gradient(model_id)

    @override
    def release_memory(self) -> None:
        accelerator.release_memory()

    @override
    def stop_waiting(self) -> None:
        """Do nothing: this trainer does not wait for other processes to start."""

    @override
    def copy_weights(self, model_id: str) -> WeightsCopy:
        model, (weights, *_) = self._models.contents(model_id)
        return WeightsCopy(model.lora, self._to_cpu(model, weights))

    def published(self, model_id: str) -> WeightsCopy:
        """Return a copy of the current weights, as passes see them."""
        model, (weights, *_) = self._models.contents(model_id)
        dtype = self._published_dtype(model)
        return WeightsCopy(model.lora, self._to_cpu(model, weights, dtype))

    @override
    def publication(self, model_id: str) -> Callable[[], WeightsCopy]:
        weights = self.published(model_id)
        return lambda: weights

    @override
    def export_state(self, model_id: str) -> TrainingState:
        return state_of(*self._models.contents(model_id), self._to_cpu)

    @override
    def begin_export(self, model_id: str) -> Callable[[], TrainingState]:
        """See `Trainer.begin_export`.

        On a CPU, the copy is made by the thread that calls the callable, while passes run; a step
        that comes first makes it, and one that comes meanwhile waits. A GPU copies an adapter
        itself, into pinned memory that is used again.
        """
        model, vectors = self._models.contents(model_id)
        if not accelerator.is_gpu(vectors[0]):
            return model.copy_later(lambda: state_of(model, vectors, self._to_cpu)).take
        if model.lora is None:
            # Pinned memory for a whole model would be twice the model.
            state = self.export_state(model_id)
            return lambda: state
        weights, _, *moments = vectors
        # It is on the GPU too: reading it later would wait for the copies.
        step = step_of(model)
        copies, finish = accelerator.begin_copy([weights, *moments])

        def finished() -> TrainingState:
            finish()
            return _state(model, copies, step, lambda _, flat: model.trainable.layout.views(flat))

        return finished

    @override
    def begin_reading(self, model_id: str, read: Callable[[TrainingState], T]) -> Callable[[], T]:
        model, vectors = self._models.contents(model_id)

        def views(model: TrainedModel, flat: Tensor) -> Mapping[str, Tensor]:
            return model.trainable.layout.views(flat)

        return model.copy_later(lambda: read(state_of(model, vectors, views))).take

    @override
    def import_state(self, model_id: str, state: TrainingState) -> None:
        model = self._models[model_id]
        weights = state.weights.tensors
        moments = {moment: _moment(state.moments, moment) for moment in MOMENTS}
        # Vectors are filled in place: a device may have no memory for a second copy of the model.
        _check(model, weights, "checkpoint")
        if state.moments is not None:
            for moment in MOMENTS:
                _check(model, moments[moment], "optimizer state")
        model.settle()
        flat = model.trainable.flat
        if state.moments is None or not state.step:
            model.reset_optimizer()
        else:
            model.begin_moments()
            of_model = model.optimizer.state[flat]
            for moment in MOMENTS:
                _fill(of_model[moment], model, moments[moment], "optimizer state")
            of_model["step"].fill_(float(state.step))
        _fill(flat.detach(), model, weights, "checkpoint")
        model.trainable.gradient.zero_()

    @override
    def export_gradient(self, model_id: str) -> Gradient | None:
        model, (_, gradient, *_) = self._models.contents(model_id)
        return None if is_zero(gradient) else self._to_cpu(model, gradient)

    @override
    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        model = self._models[model_id]
        _fill(model.trainable.gradient, model, gradient, "gradient")

    def _published_dtype(self, model: TrainedModel) -> torch.dtype:
        return self._dtype if model.lora is None else torch.float32

    def _to_cpu(
        self, model: TrainedModel, flat: Tensor, dtype: torch.dtype = torch.float32
    ) -> Mapping[str, Tensor]:
        """Return a copy of the tensors of a flat buffer on the CPU, rounded to a dtype.

        Exports must not allocate GPU memory, because another process may be using it at that time.
        """
        return model.trainable.layout.views(on_cpu(flat, dtype))


@dataclass(frozen=True, slots=True, eq=False)
class _Stepper:
    """Runs queued optimizer steps of different models as one job."""

    trainer: AdamTrainer
    models: Models

    def can_batch(self, items: Sequence[OptimizerStep], item: OptimizerStep) -> bool:
        """See `engine.thread.Batcher`. A removed model fails alone, when its step runs.

        A model that is paged out joins no other, so that those that join have room together.
        """
        return self.models.is_paged_in(item.model_id) and all(
            item.model_id != other.model_id for other in items
        )

    def run_batch(
        self, items: Sequence[OptimizerStep], yield_point: Callable[[], None]
    ) -> Sequence[Mapping[str, float]]:
        """See `engine.thread.Batcher`."""
        models = self.models.together([item.model_id for item in items])
        metrics = _apply_steps(
            [(model, item.params) for model, item in zip(models, items, strict=True)]
        )
        yield_point()
        return metrics

    def pieces(self, item: OptimizerStep, _limit: PieceLimit) -> Pieces[Mapping[str, float]]:
        """See `engine.thread.Batcher`: a step is one piece."""
        yield from ()
        return self.trainer.optim_step(item.model_id, item.params)


@torch.no_grad()
def _apply_steps(steps: Sequence[tuple[TrainedModel, AdamParams]]) -> list[dict[str, float]]:
    """Clip and apply the gradients of different models, zero them, and return each's metrics.

    A model gets the same bits as alone: each has its own step count, and kernels compute the
    vectors of a list independently.

    Raises:
        InvalidRequest: a gradient is not finite. Nothing has changed.
    """
    norms = [
        float(norm_of(model.trainable.gradient)) if model.grad_norm is None else model.grad_norm
        for model, _ in steps
    ]
    if not np.isfinite(norms).all():
        raise InvalidRequest(
            "the accumulated gradient contains NaN or infinity; it was discarded and the"
            " weights are unchanged. Check learning_rate, advantages and logprobs"
        )
    for model, _ in steps:
        model.settle()
        model.begin_moments()
    alike: dict[AdamParams, list[TrainedModel]] = defaultdict(list)
    for (model, params), norm in zip(steps, norms, strict=True):
        if params.grad_clip_norm and norm > params.grad_clip_norm:
            model.trainable.gradient.mul_(params.grad_clip_norm / norm)
        alike[replace(params, grad_clip_norm=0.0)].append(model)
    for params, models in alike.items():
        _apply_adamw(models, params)
    torch._foreach_zero_([model.trainable.gradient for model, _ in steps])
    return [
        {"grad_norm": norm, "step": float(step_of(model))}
        for (model, _), norm in zip(steps, norms, strict=True)
    ]


def _apply_adamw(models: Sequence[TrainedModel], params: AdamParams) -> None:
    """Apply the gradients of models, whose moments exist, with the same hyperparameters."""
    states = [model.optimizer.state[model.trainable.flat] for model in models]
    adamw(
        [model.trainable.flat for model in models],
        [model.trainable.gradient for model in models],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        amsgrad=False,
        beta1=params.beta1,
        beta2=params.beta2,
        lr=params.learning_rate,
        weight_decay=params.weight_decay,
        eps=params.eps,
        maximize=False,
    )


def on_cpu(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a vector on the CPU, cast there: casting on the GPU allocates memory."""
    if flat.dtype == dtype:
        return flat.to("cpu", copy=True)
    copy = torch.empty(flat.shape, dtype=dtype)
    for start in range(0, len(flat), _PART):
        copy[start : start + _PART].copy_(flat[start : start + _PART].cpu())
    return copy


def state_vectors(vectors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return flat weights and moments, by what follows the names of the weights in a state.

    Args:
        vectors: the contents of `TrainedModel.vectors`.
    """
    weights, _, *moments = vectors
    return {"": weights, **{f".{moment}": flat for moment, flat in _moments(weights, moments)}}


def state_of(
    model: TrainedModel,
    vectors: Sequence[Tensor],
    whole: Callable[[TrainedModel, Tensor], Mapping[str, Tensor]],
) -> TrainingState:
    """Return a model's state.

    Args:
        model: the model.
        vectors: the contents of `TrainedModel.vectors`.
        whole: returns the full tensors of a model from a flat buffer, copied or not.
    """
    weights, _, *moments = vectors
    return _state(model, [weights, *moments], step_of(model), whole)


def _state(
    model: TrainedModel,
    vectors: Sequence[Tensor],
    step: int,
    whole: Callable[[TrainedModel, Tensor], Mapping[str, Tensor]],
) -> TrainingState:
    """Return the state whose flat weights, and moments if there are any, are given."""
    flat_weights, *flat_moments = vectors
    weights = WeightsCopy(model.lora, whole(model, flat_weights))
    moments: dict[str, Tensor] = {}
    for moment, flat in _moments(flat_weights, flat_moments):
        moments |= {f"{name}.{moment}": tensor for name, tensor in whole(model, flat).items()}
    return TrainingState(weights, moments, step)


def _moments(flat_weights: Tensor, flat_moments: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    # Moments that are still zero are not allocated on the GPU just to be exported.
    flats = flat_moments or [torch.zeros(flat_weights.shape) for _ in MOMENTS]
    return list(zip(MOMENTS, flats, strict=True))


def _check(model: TrainedModel, tensors: Mapping[str, Tensor], what: str) -> None:
    """Check full tensors before `_fill`; raises as that."""
    if model.sharding is None:
        model.trainable.layout.check(tensors, what)
    else:
        next(iter(model.sharding.shard(tensors, what)), None)


def _fill(flat: Tensor, model: TrainedModel, tensors: Mapping[str, Tensor], what: str) -> None:
    """Copy this rank's part of a model's full tensors into a flat buffer."""
    layout = model.trainable.layout
    if model.sharding is None:
        layout.fill(flat, tensors, what)
    else:
        layout.put(flat, model.sharding.shard(tensors, what))


def _moment(moments: Mapping[str, Tensor] | None, moment: str) -> dict[str, Tensor]:
    suffix = f".{moment}"
    return {
        name.removesuffix(suffix): tensor
        for name, tensor in (moments or {}).items()
        if name.endswith(suffix)
    }


def step_of(model: TrainedModel) -> int:
    """Return the number of optimizer steps of a model."""
    state = model.optimizer.state[model.trainable.flat]
    return int(state["step"]) if state else 0
