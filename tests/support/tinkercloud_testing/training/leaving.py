"""Exports of a trainer on a separate device (`elsewhere`), and the device memory they use."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, missing in __all__
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.trainers import run
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.data_parallel import DataParallelTrainer
from tinkercloud_worker.torch_trainer.sharded_base import share_out
from tinkercloud_worker.torch_trainer.sharded_model import ShardedModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer, TorchTrainerWithSampler

_TRAINERS: Sequence[type[TorchTrainer]] = (
    TorchTrainer,
    TorchTrainerWithSampler,
    DataParallelTrainer,
)


class _Taken(TorchDispatchMode):
    """Counts the elements that operations allocate on the device, apart from scalars."""

    elements: int = 0

    def __torch_dispatch__(
        self, operation: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        known = {each.data_ptr() for each in _there((args, kwargs))}
        made = {each.data_ptr(): each.numel() for each in _there(result) if each.ndim}
        self.elements += sum(size for where, size in made.items() if where not in known)
        return result


def taken_by_what_leaves() -> dict[str, int]:
    """Return the number of elements that each export allocates on the device, by name.

    Call it in a separate process in which the device is not registered yet.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        divided = ShardedModel(TorchBaseModel(share_out(tiny_llama(), mesh)), mesh, recompute=False)
        import tinkercloud_testing.training.elsewhere  # noqa: F401, PLC0415 - it can't be undone

        taken: dict[str, int] = {}
        for kind in _TRAINERS:
            model = tiny_llama()
            torch.nn.Module.to(model, torch.device("elsewhere"))
            trainer = kind(TorchBaseModel(model), max_batch_tokens=256)
            for name, config in {"adapter": LoraConfig(rank=4, seed=1), "whole": None}.items():
                trainer.add_model(name, config)
                taken |= _by_a_trainer(trainer, name, f"{kind.__name__}, {name}")
        tensors = divided.trainable.tensors
        parts = {name: each.detach().to("elsewhere") for name, each in tensors.items()}
        pieces = partial(divided.pieces, parts, torch.bfloat16)
        taken["ShardedModel: pieces"] = taken_by(lambda: list(pieces()))
    finally:
        dist.destroy_process_group()
    return taken


def taken_by(leave: Callable[[], object]) -> int:
    """Return the number of elements that a function allocates on the device."""
    with _Taken() as taken:
        leave()
    elements: int = taken.elements
    return elements


def _by_a_trainer(trainer: TorchTrainer, model: str, what: str) -> dict[str, int]:
    taken = {f"{what}: export_state before any step": taken_by(lambda: trainer.export_state(model))}
    run(trainer, random_data([5, 9]), model_id=model)
    taken[f"{what}: export_gradient"] = taken_by(lambda: trainer.export_gradient(model))
    trainer.optim_step(model, AdamParams(learning_rate=1e-2))
    taken[f"{what}: export_state"] = taken_by(lambda: trainer.export_state(model))
    taken[f"{what}: snapshot"] = taken_by(lambda: trainer.copy_weights(model))
    taken[f"{what}: published"] = taken_by(lambda: trainer.published(model))
    return taken


def _there(values: Any) -> list[Tensor]:
    leaves = tree_leaves(values)
    return [each for each in leaves if isinstance(each, Tensor) and each.device.type != "cpu"]
