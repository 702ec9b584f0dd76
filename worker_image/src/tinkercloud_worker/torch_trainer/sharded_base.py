"""Loads a base on one rank and shards its layers over all ranks (FSDP2).

Rank 0 loads the model into host memory and broadcasts it weight by weight; each layer is sharded
before the next one is sent. A device therefore never holds more than its shards and one full layer,
in addition to the embeddings and the vision tower, which are replicated, and the host holds the
model once, regardless of the number of ranks.
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

from tinkercloud_worker.model.architecture import (
    backbone_and_lm_head,
    blank_model_with_towers,
    keep_text,
    tower_prefixes,
)
from tinkercloud_worker.model.base_model import TorchBaseModel, layers_of
from tinkercloud_worker.model.fingerprint import fingerprint_of
from tinkercloud_worker.model.loading import load_pretrained

_READER = 0


@dataclass(frozen=True, slots=True)
class _Description:
    """The description of a model that rank 0 broadcasts before its weights."""

    config: PretrainedConfig
    dtypes: dict[str, torch.dtype]
    """The dtypes of weights and buffers by name; they may differ."""
    has_towers: bool


def load_sharded(path: str, dtype: torch.dtype, mesh: DeviceMesh) -> TorchBaseModel:
    """Load a model from a local folder in Hugging Face layout. Collective over the mesh.

    Args:
        path: the folder, on the first rank of the mesh.
        dtype: the dtype of the loaded weights.
        mesh: a one-dimensional mesh of all ranks.

    Raises:
        UnsupportedModelError: this engine does not compute the architecture correctly.
    """
    if mesh.get_local_rank() != _READER:
        return TorchBaseModel(share_out(None, mesh))
    base = TorchBaseModel(share_out(load_pretrained(path, dtype), mesh))
    base.fingerprint = fingerprint_of(path)
    return base


def share_out(whole: PreTrainedModel | None, mesh: DeviceMesh) -> PreTrainedModel:
    """Shard the layers of a model over ranks; each layer is gathered while it computes.

    Passes of the returned model are collective: all ranks of the mesh run the same number in the
    same order, and either all or none run the backward pass of each. Embeddings and towers are
    replicated on the device of every rank.

    Args:
        whole: the full model on the CPU, on the first rank of the mesh; None on the others.
        mesh: a one-dimensional mesh of all ranks.
    """
    descriptions: list[_Description | None] = [None if whole is None else _described(whole)]
    dist.broadcast_object_list(descriptions, src=_READER)
    [description] = descriptions
    assert description is not None  # noqa: S101 - rank 0 has a model
    model = blank_model_with_towers(description.config)
    if not description.has_towers:
        keep_text(model)
    model.requires_grad_(requires_grad=False)
    backbone, _ = backbone_and_lm_head(model)
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

    for _, layer in layers_of(backbone):
        receive(layer)
        fully_shard(layer, mesh=mesh)
    receive(model)
    rest = {weight for weight in backbone.parameters() if not isinstance(weight, DTensor)}
    fully_shard(backbone, mesh=mesh, ignored_params=rest)
    return model


def _described(model: PreTrainedModel) -> _Description:
    dtypes = {names[0]: tensor.dtype for tensor, names in _names(model).items()}
    return _Description(model.config, dtypes, bool(tower_prefixes(model)))


def _names(module: nn.Module) -> dict[Tensor, list[str]]:
    """Return weights and buffers with their names; tied tensors have several."""
    weights = module.named_parameters(remove_duplicate=False)
    names: dict[Tensor, list[str]] = {}
    for name, tensor in chain(weights, module.named_buffers(remove_duplicate=False)):
        names.setdefault(tensor, []).append(name)
    return names
