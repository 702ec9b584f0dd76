"""Megatron trainers of tiny models, built on ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, missing in __all__

from tinkercloud_testing.ranks.ranks import BATCH_TOKENS, Measured, Mortal
from tinkercloud_testing.training.leaving import taken_by
from tinkercloud_testing.training.matrices import matrices_of
from tinkercloud_testing.training.trainers import held_models
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.megatron_trainer.devices.cpu import Cpu
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.layers.sequence import MicroBatch
from tinkercloud_worker.megatron_trainer.model import load
from tinkercloud_worker.megatron_trainer.trainer import MegatronTrainer


class MegatronRank(Mortal, MegatronTrainer, Measured):
    """One rank of a megatron trainer."""

    def held(self, model_id: str) -> Mapping[str, Tensor]:
        """Return the tensors of a model on this rank."""
        tensors = self._models[model_id].trainable.tensors
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def matrices(self, model_id: str, batch: Batch) -> set[tuple[int, ...]]:
        """Return the shapes of all matrices that a pass creates on this rank."""
        return matrices_of(lambda: self.forward_backward(model_id, batch))

    def positions(self) -> list[int]:
        """Return the number of positions of each micro-batch of the last pass."""
        return self._positions

    def _schedule(
        self, runs: Sequence[Any], micro_batches: Sequence[MicroBatch], *, is_forward: bool
    ) -> None:
        self._positions = [sum(each.sequences.lengths) for each in micro_batches]
        super()._schedule(runs, micro_batches, is_forward=is_forward)


def megatron_trainer(  # noqa: PLR0917 - the numbers of ranks, in their order
    path: str,
    tensor: int,
    pipeline: int,
    context: int = 1,
    expert: int = 1,
    max_kept_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    max_batch_tokens: int = BATCH_TOKENS,
) -> MegatronRank:
    """Return one rank of a trainer of the model in a folder."""
    base = load(path, dtype, Parallelism(tensor, pipeline, context, expert), Cpu())
    return MegatronRank(base, max_batch_tokens=max_batch_tokens, max_kept_tokens=max_kept_tokens)


def megatron_factory(  # noqa: PLR0917 - as above
    path: str,
    tensor: int,
    pipeline: int,
    context: int = 1,
    expert: int = 1,
    max_kept_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    max_batch_tokens: int = BATCH_TOKENS,
) -> Callable[[], MegatronRank]:
    """Return a function that builds one rank of a trainer, replacing an earlier one."""
    divided = (tensor, pipeline, context, expert)
    return partial(_rebuilt, path, *divided, max_kept_tokens, dtype, max_batch_tokens)


def taken_by_exporting(path: str) -> int:
    """Return the number of elements of device memory that exporting a full model allocates.

    Call it in a separate process, because it installs the device (`elsewhere`).

    Args:
        path: the folder of the base model.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        trainer = megatron_trainer(path, 1, 1)
        trainer.add_model("m", None)
        model = held_models(trainer)["m"]
        assert model.sharding is not None
        pieces = model.sharding.pieces
        import tinkercloud_testing.training.elsewhere  # noqa: F401, PLC0415 - it can't be undone

        there = {name: each.to("elsewhere") for name, each in trainer.held("m").items()}
        return taken_by(lambda: list(pieces(there, torch.bfloat16)))
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def lengthen_examples(trainer: MegatronTrainer, multiple: int) -> None:
    """Pad examples to a multiple of tokens, as ranks that divide the sequence do."""
    trainer._pad_to_multiple_of = multiple


def _rebuilt(*arguments: Any) -> MegatronRank:
    parallel_state.destroy_model_parallel()
    return megatron_trainer(*arguments)
