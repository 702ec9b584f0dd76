"""A base whose layers are sharded over ranks (FSDP2), loaded by one of them.

Rank 0 loads the model, on the host, and broadcasts it weight by weight; a layer is sharded before
the next one is sent. So a device never holds more of the layers than its shards and one whole
layer, and the host holds the model once, whatever the number of ranks.
"""

from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_worker.model.architecture import blank_model, trunk_and_head
from tinkercloud_worker.model.base_model import BaseModel, layers_of
from tinkercloud_worker.model.fingerprint import fingerprint_of
from tinkercloud_worker.model.loading import load_pretrained

_READER = 0


@dataclass(frozen=True, slots=True)
class _Description:
    """What rank 0 sends of a model before its weights."""

    config: PretrainedConfig
    dtypes: dict[str, torch.dtype]
    """Of weights and buffers, which may differ."""


def load_sharded(path: str, dtype: torch.dtype, mesh: DeviceMesh) -> BaseModel:
    """Load a model from a local folder in Hugging Face layout, at all ranks of a mesh together.

    Args:
        path: of the folder, at the mesh's first rank.
        dtype: that its weights are kept in.
        mesh: one dimension, all ranks.

    Raises:
        UnsupportedModelError: its architecture is not one we compute correctly.
    """
    if mesh.get_local_rank() != _READER:
        return BaseModel(share_out(None, mesh), packed=False)
    base = BaseModel(share_out(load_pretrained(path, dtype), mesh), packed=False)
    base.fingerprint = fingerprint_of(path)
    return base


def share_out(whole: PreTrainedModel | None, mesh: DeviceMesh) -> PreTrainedModel:
    """Divide the weights of a model's layers over ranks; a layer's are gathered while it computes.

    Passes of the returned model are collective: all ranks of the mesh run as many, in the same
    order, and each of them with a backward pass at all ranks or at none. Embeddings are whole at
    every rank, on its device.

    Args:
        whole: the model, on the CPU, at the mesh's first rank; None at the others.
        mesh: one dimension, all ranks.
    """
    told: list[_Description | None] = [None if whole is None else _described(whole)]
    dist.broadcast_object_list(told, src=_READER)
    [description] = told
    assert description is not None  # noqa: S101 - rank 0 has a model
    model = blank_model(description.config)
    model.requires_grad_(requires_grad=False)
    trunk, _ = trunk_and_head(model)
    names = _names(model)

    def receive(module: nn.Module) -> None:
        for blank in [tensor for tensor in _names(module) if tensor.is_meta]:
            first_name = names[blank][0]
            dtype = description.dtypes[first_name]
            tensor = torch.empty(blank.shape, dtype=dtype, device=mesh.device_type)
            if whole is not None:
                tensor.copy_(attrgetter(first_name)(whole))
            dist.broadcast(tensor, src=_READER)
            if isinstance(blank, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            for name in names[blank]:
                path, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(path), leaf, tensor)

    for _, layer in layers_of(trunk):
        receive(layer)
        fully_shard(layer, mesh=mesh)
    receive(model)
    rest = {weight for weight in trunk.parameters() if not isinstance(weight, DTensor)}
    fully_shard(trunk, mesh=mesh, ignored_params=rest)
    return model


def _described(model: PreTrainedModel) -> _Description:
    dtypes = {names[0]: tensor.dtype for tensor, names in _names(model).items()}
    return _Description(model.config, dtypes)


def _names(module: nn.Module) -> dict[Tensor, list[str]]:
    """Return weights and buffers with their names; tied ones have several."""
    weights = module.named_parameters(remove_duplicate=False)
    names: dict[Tensor, list[str]] = {}
    for name, tensor in chain(weights, module.named_buffers(remove_duplicate=False)):
        names.setdefault(tensor, []).append(name)
    return names
