"""Builds the trainer that a configuration selects.

Without ranks, the torch trainer runs in the head's process and shares the base model with the
sampler. Ranks are Ray actors that load the base model, or a part of it, themselves.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed.device_mesh import init_device_mesh

from tinkercloud_protocol.heads.launch import HeadConfig, TrainerConfig
from tinkercloud_worker.device import accelerator, memory
from tinkercloud_worker.engine.batch import ModelLimits, capped_context_length
from tinkercloud_worker.engine.ranks import RankTrainer
from tinkercloud_worker.engine.trainer import Trainer
from tinkercloud_worker.model.architecture import read_architecture
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.data_parallel import DataParallelTrainer
from tinkercloud_worker.torch_trainer.model_memory import ModelMemory
from tinkercloud_worker.torch_trainer.sharded import ShardedTrainer
from tinkercloud_worker.torch_trainer.sharded_base import load_sharded
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer, TorchTrainerWithSampler
from tinkercloud_worker.training.device_memory import DeviceMemory
from tinkercloud_worker.training.no_trainer import NoTrainer
from tinkercloud_worker.training.paging import DiskFiles, HostMemory, PagingPlace
from tinkercloud_worker.training.replicated import ranks_on_this_machine

if TYPE_CHECKING:
    from tinkercloud_worker.actors.rank_weight_host import RankWeightHost


def build_weight_host(config: HeadConfig) -> "RankWeightHost | None":
    """Return where published full models are stored; None for the head's own machine.

    They are stored at rank 0 if processes there can send them to engines.
    """
    inference = config.sampler.inference
    if not inference.process_group or not config.trainer.ranks or config.trainer.backend == "none":
        return None
    # Imported here because it imports Ray; see `build_trainer`.
    from tinkercloud_worker.actors.rank_weight_host import RankWeightHost  # noqa: PLC0415
    from tinkercloud_worker.actors.weight_store import WeightStoreConfig  # noqa: PLC0415

    return RankWeightHost(
        WeightStoreConfig(
            folder=Path(config.scratch_dir) / "ranks",
            max_bytes=config.limits.max_placed_bytes,
            base_path=Path(config.model.path),
            base_model=config.model.name,
        )
    )


def build_trainer(
    config: HeadConfig, base: Callable[[], TorchBaseModel], weight_host: "RankWeightHost | None"
) -> Trainer:
    """Build the trainer and start its ranks.

    Args:
        config: the head's configuration.
        base: returns the head's copy of the base model, loaded by the first call.
        weight_host: where the full models that its ranks publish are stored.

    Raises:
        RanksUnavailable: the ranks could not be started.
    """
    if config.trainer.backend == "none":
        return NoTrainer(_limits(config))
    if config.trainer.ranks == 0:
        kind = TorchTrainerWithSampler if config.sampler.backend == "torch" else TorchTrainer
        model = base()
        return kind(
            model,
            max_batch_tokens=config.trainer.max_batch_tokens,
            max_shared_tokens=config.trainer.max_shared_tokens,
            max_context_length=config.limits.max_context_length,
            max_kept_tokens=config.trainer.max_kept_tokens,
            memory=ModelMemory(
                partial(accelerator.available_bytes, model.device),
                _place(config, model.device),
                accelerator.peak_meter(model.device),
            ),
        )
    # Importing Ray takes seconds and a hundred megabytes: not for single-process heads.
    from tinkercloud_worker.actors.rank_group import (  # noqa: PLC0415
        GroupShape,
        GroupTimings,
        RankGroup,
        connect,
    )
    from tinkercloud_worker.actors.ranked_trainer import RankedTrainer  # noqa: PLC0415

    gpus = accelerator.gpus_of(config.trainer.device)
    shape = GroupShape(config.trainer.ranks, gpus_per_rank=gpus, strategy=strategy(config.trainer))
    factory: Callable[[], RankTrainer] = partial(
        torch_rank if config.trainer.backend == "torch" else megatron_rank, config
    )
    timings = GroupTimings(start=config.trainer.start_timeout_seconds)
    connect(shape)
    return RankedTrainer(
        lambda cancelled: RankGroup(shape, factory, timings, cancelled), weight_host
    )


def _rank_memory(config: HeadConfig) -> DeviceMemory:
    """Return the memory of this rank: its GPU, or its part of this machine's memory. Collective."""
    if config.sampler.inference.colocated:
        # What engines on the same GPU leave free says nothing about a trainer that has it.
        return DeviceMemory()
    device, ranks = torch.device(config.trainer.device), ranks_on_this_machine()
    has_own = accelerator.gpus_of(config.trainer.device) > 0
    available = partial(accelerator.available_bytes, device)
    return DeviceMemory(
        available if has_own else memory.part_of(available, ranks),
        _place(config, device, ranks),
        accelerator.peak_meter(device),
    )


def _place(config: HeadConfig, device: torch.device, processes: int = 1) -> PagingPlace | None:
    """Return where idle models go if others need their memory.

    Args:
        config: the configuration.
        device: where the models are.
        processes: number of processes on this machine that share the place.
    """
    if config.sampler.inference.colocated:
        # Models are saved while the engines have the GPU's memory, and are loaded for that.
        return None
    if device.type == "cpu":
        folder = Path(config.scratch_dir) / "idle_models"
        return DiskFiles(folder, config.limits.max_paged_bytes, processes)
    return HostMemory(memory.part_of(memory.available_bytes, processes))


def strategy(trainer: TrainerConfig) -> Literal["PACK", "SPREAD"]:
    """Return the placement strategy of ranks: on few nodes of a Ray cluster, or on many.

    Ranks that share a model communicate in every layer, and GPUs of a node have fast links.
    Replicas on CPUs communicate once per step, and are faster with a node's cores to themselves.
    """
    is_divided = trainer.sharded or trainer.model_ranks * trainer.expert_parallel > 1
    return "PACK" if is_divided or accelerator.gpus_of(trainer.device) else "SPREAD"


def _limits(config: HeadConfig) -> ModelLimits:
    limits = read_architecture(config.model.path).limits
    longest = capped_context_length(config.limits.max_context_length, limits.max_context_length)
    return replace(limits, max_context_length=longest)


def torch_rank(config: HeadConfig) -> DataParallelTrainer:
    """Build the torch trainer of a rank."""
    trainer = config.trainer
    dtype: torch.dtype = getattr(torch, trainer.dtype)
    if trainer.sharded:
        mesh = init_device_mesh(trainer.device, (trainer.ranks,))
        return ShardedTrainer(
            load_sharded(config.model.path, dtype, mesh),
            mesh,
            max_batch_tokens=trainer.max_batch_tokens,
            max_shared_tokens=trainer.max_shared_tokens,
            max_context_length=config.limits.max_context_length,
            max_kept_tokens=None if trainer.max_kept_tokens is None else 0,
            memory=_rank_memory(config),
        )
    base = TorchBaseModel.load(config.model.path, dtype, device=trainer.device)
    return DataParallelTrainer(
        base,
        max_batch_tokens=trainer.max_batch_tokens,
        max_shared_tokens=trainer.max_shared_tokens,
        max_context_length=config.limits.max_context_length,
        max_kept_tokens=trainer.max_kept_tokens,
        memory=_rank_memory(config),
    )


def megatron_rank(config: HeadConfig) -> RankTrainer:
    """Return a rank's MegatronTrainer."""
    # megatron-core is in trainers' images only; here it would be imported by every head.
    from tinkercloud_worker.megatron_trainer.devices.select_device import device_of  # noqa: PLC0415
    from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism  # noqa: PLC0415
    from tinkercloud_worker.megatron_trainer.model import load  # noqa: PLC0415
    from tinkercloud_worker.megatron_trainer.trainer import MegatronTrainer  # noqa: PLC0415

    trainer = config.trainer
    base = load(
        config.model.path,
        getattr(torch, trainer.dtype),
        Parallelism(
            tensor=trainer.tensor_parallel,
            pipeline=trainer.pipeline_parallel,
            context=trainer.context_parallel,
            expert=trainer.expert_parallel,
        ),
        device_of(trainer.device),
    )
    return MegatronTrainer(
        base,
        max_batch_tokens=trainer.max_batch_tokens,
        max_shared_tokens=trainer.max_shared_tokens,
        max_context_length=config.limits.max_context_length,
        max_kept_tokens=trainer.max_kept_tokens,
        memory=_rank_memory(config),
    )
