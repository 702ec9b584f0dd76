"""Megatron trainers of tiny models, to be built at ranks."""

from collections.abc import Callable
from functools import partial

import torch

from tinkercloud_testing.ranks import BATCH_TOKENS
from tinkercloud_worker.megatron_trainer.cpu import Cpu
from tinkercloud_worker.megatron_trainer.device import Parallelism
from tinkercloud_worker.megatron_trainer.model import load
from tinkercloud_worker.megatron_trainer.trainer import MegatronTrainer


def megatron_trainer(  # noqa: PLR0917 - the numbers of ranks, in their order
    path: str,
    tensor: int,
    pipeline: int,
    context: int = 1,
    expert: int = 1,
    max_kept_tokens: int | None = None,
) -> MegatronTrainer:
    """Return a rank's part of a trainer of the model in a folder, in float32."""
    base = load(path, torch.float32, Parallelism(tensor, pipeline, context, expert), Cpu())
    return MegatronTrainer(base, max_batch_tokens=BATCH_TOKENS, max_kept_tokens=max_kept_tokens)


def megatron_factory(  # noqa: PLR0917 - as above
    path: str,
    tensor: int,
    pipeline: int,
    context: int = 1,
    expert: int = 1,
    max_kept_tokens: int | None = None,
) -> Callable[[], MegatronTrainer]:
    """Return what builds a rank's part of a trainer."""
    return partial(megatron_trainer, path, tensor, pipeline, context, expert, max_kept_tokens)
