"""Models of which every rank holds a copy, or a part, and contributes to the gradient.

Between steps the sum of the ranks' gradients is the model's, whoever contributed what. The ranks
meet once a step: the gradients are summed over them, and as that gives all that hold the same
weights the same bits, all apply the same update, each by itself, and stay equal. Of a model that
lies over ranks (`engine.ranks.Parts`) each does so with its part.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_worker import accelerator
from tinkercloud_worker.adam import AdamTrainer, TrainedModel, on_cpu, state_of
from tinkercloud_worker.engine.ranks import Parts
from tinkercloud_worker.engine.trainer import Gradient, TrainingState


class ReplicatedTrainer(AdamTrainer):
    """A rank's part. `torch.distributed` must be initialised, and all ranks get the same calls."""

    def add_model(self, model_id: str, lora_config: LoraConfig | None) -> None:
        """See `Trainer.add_model`. All begin from rank 0's values: a seed nobody gave differs."""
        super().add_model(model_id, lora_config)
        model = self._models[model_id]
        if lora_config is not None and model.parts is None:
            dist.broadcast(model.trainable.flat.detach(), src=0)

    def sum_gradient(self, model_id: str) -> None:
        """See `RankTrainer.sum_gradient`."""
        model = self._models[model_id]
        _add_up(model, model.trainable.gradient)
        parts = _parted(model)
        model.norm = parts.norm(model.trainable.gradient) if parts else None

    def export_gradient(self, model_id: str) -> Gradient | None:
        """See `Trainer.export_gradient`. The sum over the ranks, whose contributions stay.

        Ranks add up copies on the CPU, over gloo: it takes no memory of theirs.
        """
        model = self._models[model_id]
        total = model.trainable.gradient.to("cpu", copy=True)
        _add_up(model, total)
        whole = self._whole(model, total)
        return whole if any(tensor.any() for tensor in whole.values()) else None

    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """See `Trainer.import_gradient`. Each rank holds what it would have contributed."""
        super().import_gradient(model_id, gradient)
        model = self._models[model_id]
        if model.parts is not None:
            model.parts.contribute(model.trainable.gradient)
        elif dist.get_rank() != 0:
            self.discard_gradient(model_id)

    def salvage(self) -> Mapping[str, TrainingState]:
        """See `RankTrainer.salvage`."""
        whole = {name: model for name, model in list(self._models.items()) if not _parted(model)}
        with accelerator.beside_what_hangs():
            return {name: state_of(model, _on_cpu) for name, model in whole.items()}

    def _whole(
        self, model: TrainedModel, flat: Tensor, dtype: torch.dtype = torch.float32
    ) -> Mapping[str, Tensor]:
        """Return the whole tensors at rank 0; at the others nothing, even if they have them."""
        if dist.get_rank() == 0 or _parted(model):
            return _on_cpu(model, flat, dtype)
        return {}


def _on_cpu(
    model: TrainedModel, flat: Tensor, dtype: torch.dtype = torch.float32
) -> Mapping[str, Tensor]:
    """Return a copy of whole tensors on the CPU: where they arrive there may be nothing else."""
    layout = model.trainable.layout
    if model.parts is not None:
        return model.parts.gather(layout.views(flat), dtype)
    return layout.views(on_cpu(flat, dtype))


def _parted(model: TrainedModel) -> Parts | None:
    """Return how a model lies over ranks, if none of them holds all of it."""
    return None if model.parts is None or model.parts.is_whole else model.parts


def _add_up(model: TrainedModel, gradient: Tensor) -> None:
    if model.parts is None:
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
    else:
        model.parts.add_up(gradient)
