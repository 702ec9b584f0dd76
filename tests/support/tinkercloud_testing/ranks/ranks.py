"""Trainers for the ranks of a group, with ways to make them fail."""

import gc
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch
from zlib import crc32

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.small_models.families import READS_IMAGES
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_worker.actors.rank_group import RankGroup
from tinkercloud_worker.actors.ranked_trainer import RankedTrainer
from tinkercloud_worker.engine.trainer import Gradient, TrainingState
from tinkercloud_worker.model.architecture import backbone_and_lm_head, blank_model_with_towers
from tinkercloud_worker.model.base_model import TorchBaseModel, layers_of
from tinkercloud_worker.torch_trainer import sharded_base
from tinkercloud_worker.torch_trainer.data_parallel import DataParallelTrainer
from tinkercloud_worker.torch_trainer.sharded import ShardedTrainer
from tinkercloud_worker.torch_trainer.sharded_base import share_out
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.training.adam import AdamTrainer

BATCH_TOKENS = 32
"""max_batch_tokens of these trainers: small, so that a batch has several micro-batches."""

TrainerOf = Callable[[int, Callable[[], AdamTrainer]], RankedTrainer]
"""Creates a trainer with a number of ranks, each of which builds its part."""

Trainers = tuple[RankedTrainer, TorchTrainer]
"""A trainer with several ranks, and the reference on one."""


def often(names: Iterable[str], usual: Sequence[str]) -> list[Any]:
    """Return parameters of a test, of which all but the usual ones are long."""
    return [name if name in usual else pytest.param(name, marks=pytest.mark.long) for name in names]


class Successive:
    """A rank that can switch trainers, because importing takes longer than most tests."""

    def become(self, factory: Callable[[], AdamTrainer]) -> None:
        """Become a part of another trainer."""
        self._trainer = factory()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the trainer."""
        return getattr(self._trainer, name)


class Mortal:
    """A rank's trainer that can be killed during a method."""

    def die_in(self, method: str, *ranks: int) -> None:
        """Kill these ranks as soon as a method is called."""
        if dist.get_rank() in ranks:
            setattr(self, method, _die)

    def fail_in(
        self, method: str, error: type[Exception] = MemoryError, ranks: Sequence[int] = ()
    ) -> None:
        """Raise an error whenever a method is called, at these ranks or, without any, at all."""
        if not ranks or dist.get_rank() in ranks:
            setattr(self, method, partial(_fail, error))


class MortalTrainer(Mortal, DataParallelTrainer):
    """A rank's torch trainer of the tiny Llama."""

    def __init__(self) -> None:
        super().__init__(TorchBaseModel(tiny_llama()), max_batch_tokens=BATCH_TOKENS)


class ReplicaWithImages(DataParallelTrainer):
    """A rank's torch trainer of a family in `READS_IMAGES`."""

    def __init__(self, family: str) -> None:
        super().__init__(
            TorchBaseModel(READS_IMAGES[family]()),
            max_batch_tokens=BATCH_TOKENS,
            max_shared_tokens=BATCH_TOKENS,
        )


@dataclass(frozen=True)
class Receipt:
    """A measurement of tensors received by a rank."""

    size: int
    """In bytes."""
    shared: int
    """Bytes in the object store of its node."""
    private: int
    """Private memory of this process in bytes, before any of them was read."""
    is_unchanged: bool
    """Whether their values are unchanged after use."""


class Watched(dict[str, Tensor]):
    """Tensors by name that record the memory of the process on each access."""

    most_private = 0
    """See `private_bytes`."""

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor."""
        self.most_private = max(self.most_private, private_bytes())
        return super().__getitem__(name)


class Measured(AdamTrainer):
    """A rank's trainer that measures its tensors and the location of its inputs."""

    receipt: Receipt
    """The receipt of the last state or gradient."""
    most_private = 0
    """Peak private memory in bytes while the process read the last gradient."""

    def import_state(self, model_id: str, state: TrainingState) -> None:
        """See `Trainer.import_state`."""
        with self._receiving([*state.weights.tensors.values(), *(state.moments or {}).values()]):
            super().import_state(model_id, state)

    def import_gradient(self, model_id: str, gradient: Gradient) -> None:
        """See `Trainer.import_gradient`."""
        watched = Watched(gradient)
        with self._receiving(list(gradient.values())):
            super().import_gradient(model_id, watched)
        self.most_private = watched.most_private

    @contextmanager
    def _receiving(self, tensors: list[Tensor]) -> Iterator[None]:
        private, before = private_bytes(), checksums(tensors)
        yield
        size, shared = sum(tensor.nbytes for tensor in tensors), bytes_in_store(tensors)
        self.receipt = Receipt(size, shared, private, before == checksums(tensors))

    def last_receipt(self) -> Receipt:
        """Return the receipt of the last state or gradient."""
        return self.receipt

    def most_private_bytes(self) -> int:
        """Return the attribute."""
        return self.most_private

    def private_bytes(self) -> int:
        """See the function."""
        return private_bytes()

    def bytes_held_in_store(self) -> int:
        """Return the bytes of all tensors of this rank in the object store of the node."""
        gc.collect()
        return bytes_in_store(each for each in gc.get_objects() if type(each) is Tensor)

    def count_without_collecting(self) -> None:
        """Disable garbage collection, so that `tensors_alive` also counts unreachable cycles."""
        gc.collect()
        gc.disable()

    def tensors_alive(self) -> int:
        """Return the number of tensor elements in this process."""
        alive = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
        sizes = {each.data_ptr(): each.numel() for each in alive if not isinstance(each, DTensor)}
        return sum(sizes.values())

    def trained_elements(self, model_id: str) -> int:
        """Return the number of elements of a model on this rank: weights, gradient and moments."""
        model = self._models[model_id]
        state = model.optimizer.state[model.trainable.flat]
        held = [model.trainable.flat, model.trainable.gradient, *state.values()]
        return sum(tensor.numel() for tensor in held if tensor.ndim)


class MeasuredTrainer(Mortal, ShardedTrainer, Measured):
    """A rank's trainer of a tiny model with sharded layers."""

    def __init__(
        self,
        max_kept_tokens: Literal[0] | None = None,
        make: Callable[[], PreTrainedModel] = tiny_llama,
    ) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = None if dist.get_rank() else make()
        with _counting_whole_layers() as counts:
            shared = share_out(whole, mesh)
        self._most_whole_layers = max(counts)
        super().__init__(
            TorchBaseModel(shared),
            mesh,
            max_batch_tokens=BATCH_TOKENS,
            max_kept_tokens=max_kept_tokens,
        )

    def most_whole_layers(self) -> int:
        """Return the maximum number of full layers on this rank while the base was sharded."""
        return self._most_whole_layers

    def layer_elements(self) -> int:
        """Return the number of elements of layers on this rank."""
        weights = self._base.named_weights().values()
        return sum(w.to_local().numel() for w in weights if isinstance(w, DTensor))


@contextmanager
def _counting_whole_layers() -> Iterator[list[int]]:
    """Record the number of full layers on this rank whenever modules are sharded."""
    models: list[PreTrainedModel] = []
    counts: list[int] = []

    def is_whole(weight: Tensor) -> bool:
        return not (weight.is_meta or isinstance(weight, DTensor))

    def blank(config: PretrainedConfig) -> PreTrainedModel:
        models.append(blank_model_with_towers(config))
        return models[0]

    def divide(*arguments: Any, **options: Any) -> object:
        layers = [layer for _, layer in layers_of(backbone_and_lm_head(models[0])[0])]
        counts.append(sum(any(map(is_whole, layer.parameters())) for layer in layers))
        return fully_shard(*arguments, **options)

    with (
        patch.object(sharded_base, "blank_model_with_towers", blank),
        patch.object(sharded_base, "fully_shard", divide),
    ):
        yield counts


def weights_at_ranks(group: RankGroup, model_id: str) -> list[Mapping[str, Tensor]]:
    """Return each rank's weights of a replicated model."""
    states = group.call_each("salvage", [()] * group.shape.ranks)
    return [models[model_id].weights.tensors for models in states]


def private_bytes() -> int:
    """Return the private, anonymous memory of this process in bytes."""
    # Freed memory should not hide later allocations.
    CDLL(None).malloc_trim(0)
    rollup = Path("/proc/self/smaps_rollup").read_text()
    kilobytes = re.search(r"^Anonymous: +(\d+) kB$", rollup, re.MULTILINE)
    assert kilobytes is not None
    return int(kilobytes[1]) * 1024


def bytes_in_store(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors in the object store of this node."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "plasma" in line]
    mapped = [range(*(int(end, 16) for end in line.split()[0].split("-"))) for line in lines]
    return sum(each.nbytes for each in tensors if any(each.data_ptr() in here for here in mapped))


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return checksums of tensors without copying them."""
    return [crc32(tensor.numpy().data) for tensor in tensors]


def _fail(error: type[Exception], *_: object) -> None:
    raise error("no room for it")


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def actors_of(group: Any) -> Any:
    """Return the Ray actors of a group of ranks, by rank."""
    return group._ranks
