"""Trainers for the ranks of a group, and ways to fail."""

import os
import signal
from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.models import tiny_llama
from tinkercloud_worker.adam import AdamTrainer
from tinkercloud_worker.base_model import BaseModel
from tinkercloud_worker.torch_trainer.data_parallel import DataParallelTrainer
from tinkercloud_worker.torch_trainer.sharded import ShardedTrainer

BATCH_TOKENS = 32
"""Of the trainers here: small, so that a batch is several micro-batches."""


class Successive:
    """A rank of one trainer after another: importing takes longer than what most trainers do."""

    def become(self, factory: Callable[[], AdamTrainer]) -> None:
        """Be a part of another trainer."""
        self._trainer = factory()

    def __getattr__(self, name: str) -> Any:
        """Return what the trainer has by a name."""
        return getattr(self._trainer, name)


class Mortal:
    """A rank's trainer that can be killed in the midst of a method."""

    def die_in(self, method: str, *ranks: int) -> None:
        """Be killed as soon as a method is called at one of these ranks."""
        if dist.get_rank() in ranks:
            setattr(self, method, _die)


class MortalTrainer(Mortal, DataParallelTrainer):
    """A rank's torch trainer of the tiny Llama."""

    def __init__(self) -> None:
        super().__init__(BaseModel(tiny_llama()), max_batch_tokens=BATCH_TOKENS)


class Measured(AdamTrainer):
    """A rank's trainer that tells what it holds."""

    def trained_elements(self, model_id: str) -> int:
        """Return how many numbers are held here of a model: weights, gradient and moments."""
        model = self._models[model_id]
        state = model.optimizer.state[model.trainable.flat]
        held = [model.trainable.flat, model.trainable.gradient, *state.values()]
        return sum(tensor.numel() for tensor in held if tensor.ndim)


class MeasuredTrainer(Mortal, ShardedTrainer, Measured):
    """A rank's trainer of a tiny model, whose layers the ranks hold between them."""

    def __init__(
        self,
        max_kept_tokens: Literal[0] | None = None,
        make: Callable[[], PreTrainedModel] = tiny_llama,
    ) -> None:
        super().__init__(
            BaseModel(make(), packed=False),
            max_batch_tokens=BATCH_TOKENS,
            max_kept_tokens=max_kept_tokens,
        )

    def layer_elements(self) -> int:
        """Return how many numbers of the layers are held here."""
        weights = self._base.named_weights().values()
        return sum(w.to_local().numel() for w in weights if isinstance(w, DTensor))


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
