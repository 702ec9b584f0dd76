"""Models of which every rank holds a whole copy, and a part of the gradient.

Between steps the sum of the ranks' gradients is the model's, whoever holds which part. The copies
meet once a step: optim_step sums the gradients over the ranks, and as that gives all of them the
same bits, all apply the same update and stay equal.
"""

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from tinkercloud_protocol.training import AdamParams, LoraConfig
from tinkercloud_worker.adam import AdamTrainer
from tinkercloud_worker.engine.trainer import Gradient


class ReplicatedTrainer(AdamTrainer):
    """A rank's part. `torch.distributed` must be initialised, and all ranks get the same calls."""

    def add_model(self, model_id: str, lora_config: LoraConfig | None) -> None:
        """See `Trainer.add_model`. All begin from rank 0's values: a seed nobody gave differs."""
        super().add_model(model_id, lora_config)
        dist.broadcast(self._models[model_id].trainable.flat.detach(), src=0)

    def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        """See `Trainer.optim_step`."""
        _add_up(self._models[model_id].trainable.gradient)
        return super().optim_step(model_id, params)

    def export_gradient(self, model_id: str) -> Gradient | None:
        """See `Trainer.export_gradient`. The sum over the ranks, whose own parts stay."""
        trainable = self._models[model_id].trainable
        total = trainable.gradient.clone()
        _add_up(total)
        return trainable.layout.views(total) if total.any() else None

    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """See `Trainer.import_gradient`. Rank 0 holds it; the others' parts are nothing."""
        super().import_gradient(model_id, gradient)
        if dist.get_rank() != 0:
            self.discard_gradient(model_id)


def _add_up(tensor: Tensor) -> None:
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
