"""Models of which every rank holds a whole copy, and a part of the gradient.

Between steps the sum of the ranks' gradients is the model's, whoever holds which part. The copies
meet once a step: the gradients are summed over the ranks, and as that gives all of them the same
bits, all apply the same update, each by itself, and stay equal.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from tinkercloud_protocol.training import LoraConfig
from tinkercloud_worker.adam import AdamTrainer
from tinkercloud_worker.engine.trainer import Gradient, TrainingState, WeightsSnapshot


class ReplicatedTrainer(AdamTrainer):
    """A rank's part. `torch.distributed` must be initialised, and all ranks get the same calls."""

    def add_model(self, model_id: str, lora_config: LoraConfig | None) -> None:
        """See `Trainer.add_model`. All begin from rank 0's values: a seed nobody gave differs."""
        super().add_model(model_id, lora_config)
        dist.broadcast(self._models[model_id].trainable.flat.detach(), src=0)

    def snapshot(self, model_id: str) -> WeightsSnapshot:
        """See `Trainer.snapshot`. What leaves a rank is on the CPU: it may be the only one here."""
        weights = super().snapshot(model_id)
        return replace(weights, tensors=_on_cpu(weights.tensors))

    def export_state(self, model_id: str) -> TrainingState:
        """See `Trainer.export_state`. On the CPU, as above."""
        state = super().export_state(model_id)
        return replace(state, moments=_on_cpu(state.moments or {}))

    def sum_gradient(self, model_id: str) -> None:
        """See `RankTrainer.sum_gradient`."""
        _add_up(self._models[model_id].trainable.gradient)

    def export_gradient(self, model_id: str) -> Gradient | None:
        """See `Trainer.export_gradient`. The sum over the ranks, whose own parts stay."""
        trainable = self._models[model_id].trainable
        total = trainable.gradient.clone()
        _add_up(total)
        return trainable.layout.views(total.cpu()) if total.any() else None

    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """See `Trainer.import_gradient`. Rank 0 holds it; the others' parts are nothing."""
        super().import_gradient(model_id, gradient)
        if dist.get_rank() != 0:
            self.discard_gradient(model_id)

    def last_words(self) -> Mapping[str, TrainingState]:
        """See `RankTrainer.last_words`."""
        return {model_id: self.export_state(model_id) for model_id in list(self._models)}


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _add_up(tensor: Tensor) -> None:
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
