"""Megatron trainers of tiny models, to be built at ranks."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from tinkercloud_testing.ranks import BATCH_TOKENS, Measured, Mortal
from tinkercloud_worker.megatron_trainer.cpu import Cpu
from tinkercloud_worker.megatron_trainer.device import Parallelism
from tinkercloud_worker.megatron_trainer.model import load
from tinkercloud_worker.megatron_trainer.trainer import MegatronTrainer


class MegatronRank(Mortal, MegatronTrainer, Measured):
    """A rank's part of a trainer."""

    def held(self, model_id: str) -> Mapping[str, Tensor]:
        """Return the tensors of a model that are held here."""
        tensors = self._models[model_id].trainable.tensors
        return {name: tensor.detach() for name, tensor in tensors.items()}


def megatron_trainer(  # noqa: PLR0917 - the numbers of ranks, in their order
    path: str,
    tensor: int,
    pipeline: int,
    context: int = 1,
    expert: int = 1,
    max_kept_tokens: int | None = None,
) -> MegatronRank:
    """Return a rank's part of a trainer of the model in a folder, in float32."""
    base = load(path, torch.float32, Parallelism(tensor, pipeline, context, expert), Cpu())
    return MegatronRank(base, max_batch_tokens=BATCH_TOKENS, max_kept_tokens=max_kept_tokens)


def megatron_factory(  # noqa: PLR0917 - as above
    path: str,
    tensor: int,
    pipeline: int,
    context: int = 1,
    expert: int = 1,
    max_kept_tokens: int | None = None,
) -> Callable[[], MegatronRank]:
    """Return what builds a rank's part of a trainer."""
    return partial(megatron_trainer, path, tensor, pipeline, context, expert, max_kept_tokens)
