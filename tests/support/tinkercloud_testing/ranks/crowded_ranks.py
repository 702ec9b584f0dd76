"""Ranks whose devices have memory for a few adapters."""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tinkercloud_testing.ranks.megatron import MegatronRank
from tinkercloud_testing.ranks.ranks import BATCH_TOKENS, Mortal
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_worker.engine.memory_report import KEPT_FREE_BYTES
from tinkercloud_worker.megatron_trainer.devices.cpu import Cpu
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.model import load
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.data_parallel import DataParallelTrainer
from tinkercloud_worker.training.adam import AdamTrainer
from tinkercloud_worker.training.device_memory import DeviceMemory
from tinkercloud_worker.training.paging import Content, DiskFiles


class Folder(DiskFiles):
    """Files that can fail."""

    is_broken = False

    def keep(self, vector: torch.Tensor) -> Content:
        """See `Place`."""
        if self.is_broken:
            raise OSError("the disk is broken")
        return super().keep(vector)


class SmallMemory(DeviceMemory):
    """A device with memory for models of a number of bytes in all."""

    def __init__(self, files: Path, size: int, in_files: int) -> None:
        self.folder = Folder(files, in_files)
        super().__init__(self._left, self.folder)
        self.size = size

    def used(self) -> int:
        """Return the bytes of all models that are there."""
        return sum(map(self.models.memory_bytes, self.models))

    def _left(self) -> int:
        return self.size + KEPT_FREE_BYTES - self.used()


class Crowded(Mortal, AdamTrainer):
    """A rank's trainer whose memory can be changed."""

    _memory: SmallMemory

    def resize(self, size: int) -> None:
        """Change the bytes for all models."""
        self._memory.size = size

    def break_files(self, is_broken: bool) -> None:
        """Let the place of idle models fail, or no more."""
        self._memory.folder.is_broken = is_broken

    def used(self) -> int:
        """Return the bytes of all models that are there."""
        return self._memory.used()


class CrowdedReplica(Crowded, DataParallelTrainer):
    """A rank's torch trainer of the tiny Llama."""


class CrowdedMegatron(Crowded, MegatronRank):
    """One rank of a megatron trainer."""


def crowded_replica(files: Path, size: int, in_files: int) -> CrowdedReplica:
    """Return one of several replicas, with so many bytes for models in memory, and in files."""
    return CrowdedReplica(
        TorchBaseModel(tiny_llama()),
        max_batch_tokens=BATCH_TOKENS,
        memory=SmallMemory(files, size, in_files),
    )


def crowded_megatron(path: str, files: Path, size: int, in_files: int) -> CrowdedMegatron:
    """Return one of two ranks that share the tensors of a model, in place of an earlier one."""
    parallel_state.destroy_model_parallel()
    base = load(path, torch.float32, Parallelism(dist.get_world_size(), 1, 1, 1), Cpu())
    return CrowdedMegatron(
        base, max_batch_tokens=BATCH_TOKENS, memory=SmallMemory(files, size, in_files)
    )
