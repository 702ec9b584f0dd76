"""Models that are replicated or sharded over ranks, each computing part of the gradient.

Between steps the gradient of a model is the sum of the ranks' gradients. It is reduced once per
step, so all ranks that hold the same weights get the same bits, apply the same update independently
and stay identical. For a sharded model (`engine.ranks.Sharding`), each rank updates its shard.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_worker.device import accelerator
from tinkercloud_worker.engine.ranks import RankTrainer, Sharding
from tinkercloud_worker.engine.trainer import Gradient, OptimizerStep, TrainingState
from tinkercloud_worker.training.adam import AdamTrainer, on_cpu, state_of
from tinkercloud_worker.training.trained_model import TrainedModel


class ReplicatedTrainer(AdamTrainer, RankTrainer):
    """A rank's trainer. `torch.distributed` must be initialized; all ranks get the same calls."""

    @override
    def add_model(self, model_id: str, lora_config: LoraConfig | None) -> None:
        """Add a model on every rank, with rank 0's initial values: seeds may differ."""
        super().add_model(model_id, lora_config)
        model = self._models[model_id]
        if lora_config is not None and model.sharding is None:
            dist.broadcast(model.trainable.flat.detach(), src=0)

    @override
    def sum_gradient(self, model_id: str) -> None:
        model = self._models[model_id]
        _reduce(model, model.trainable.gradient)
        sharding = _sharding(model)
        model.grad_norm = sharding.grad_norm(model.trainable.gradient) if sharding else None

    @override
    def sum_gradients(self, model_ids: Sequence[str]) -> None:
        for model_id in model_ids:
            self.sum_gradient(model_id)

    @override
    def optim_steps(self, steps: Sequence[OptimizerStep]) -> Sequence[Mapping[str, float]]:
        try:
            return self.stepper.run_batch(steps, lambda: None)
        except InvalidRequest:
            for step in steps:
                self._unsum_gradient(step.model_id)
            raise

    def _unsum_gradient(self, model_id: str) -> None:
        """Change the ranks' gradients so that their sum equals that of each rank."""
        model = self._models[model_id]
        if model.sharding is not None:
            model.sharding.unreduce_gradient(model.trainable.gradient)
        elif dist.get_rank() != 0:
            self.discard_gradient(model_id)

    @override
    def export_gradient(self, model_id: str) -> Gradient | None:
        """Return the sum over ranks; the ranks' own gradients are unchanged.

        The ranks sum copies on the CPU over gloo, which takes no GPU memory.
        """
        model = self._models[model_id]
        total = model.trainable.gradient.to("cpu", copy=True)
        _reduce(model, total)
        whole = self._to_cpu(model, total)
        return whole if any(tensor.any() for tensor in whole.values()) else None

    @override
    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """Replace the gradient so that the sum over ranks equals the given one."""
        super().import_gradient(model_id, gradient)
        self._unsum_gradient(model_id)

    @override
    def salvage(self) -> Mapping[str, TrainingState]:
        whole = {name: model for name, model in list(self._models.items()) if not _sharding(model)}
        with accelerator.side_stream():
            return {
                name: state_of(model, model.vectors, _gathered) for name, model in whole.items()
            }

    def _to_cpu(
        self, model: TrainedModel, flat: Tensor, dtype: torch.dtype = torch.float32
    ) -> Mapping[str, Tensor]:
        """Return the full tensors on rank 0, and nothing on the others, even if they hold them."""
        if dist.get_rank() == 0 or _sharding(model):
            return _gathered(model, flat, dtype)
        return {}


def _gathered(
    model: TrainedModel, flat: Tensor, dtype: torch.dtype = torch.float32
) -> Mapping[str, Tensor]:
    """Return a copy of the full tensors on the CPU: the receiver may have no other device."""
    layout = model.trainable.layout
    if model.sharding is not None:
        return model.sharding.gather(layout.views(flat), dtype)
    return layout.views(on_cpu(flat, dtype))


def _sharding(model: TrainedModel) -> Sharding | None:
    """Return how a model is sharded, if no rank holds all of it."""
    return None if model.sharding is None or model.sharding.is_whole else model.sharding


def _reduce(model: TrainedModel, gradient: Tensor) -> None:
    if model.sharding is None:
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
    else:
        model.sharding.reduce_gradient(gradient)
