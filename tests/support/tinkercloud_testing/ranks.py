"""Trainers for the ranks of a group, and ways to fail."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.models import tiny_llama
from tinkercloud_worker.adam import AdamTrainer
from tinkercloud_worker.base_model import BaseModel
from tinkercloud_worker.torch_trainer.data_parallel import DataParallelTrainer
from tinkercloud_worker.torch_trainer.sharded import ShardedTrainer
from tinkercloud_worker.torch_trainer.sharded_base import share_out

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
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = None if dist.get_rank() else make()
        before = _resident_bytes()
        Path("/proc/self/clear_refs").write_text("5")
        shared = share_out(whole, mesh)
        self._taken = _resident_bytes("VmHWM") - before
        super().__init__(
            BaseModel(shared, packed=False),
            mesh,
            max_batch_tokens=BATCH_TOKENS,
            max_kept_tokens=max_kept_tokens,
        )

    def bytes_taken(self) -> int:
        """Return by how much this process had grown at most while the base was shared out."""
        return self._taken

    def layer_elements(self) -> int:
        """Return how many numbers of the layers are held here."""
        weights = self._base.named_weights().values()
        return sum(w.to_local().numel() for w in weights if isinstance(w, DTensor))


def _resident_bytes(figure: Literal["VmRSS", "VmHWM"] = "VmRSS") -> int:
    """Return what this process holds of the machine's memory, or held at most since a reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return int(status[figure].split()[0]) * 1024


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
