"""Completes imported adapters, which may lack some of a model's weights."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tinkercloud_protocol.adapters.peft import BASE_COPY
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.lora import imported_adapters
from tinkercloud_worker.model.architecture import BUILDING, read_architecture
from tinkercloud_worker.model.weight_files import (
    StoredTensor,
    UnreadableWeights,
    stored_tensors,
    weight_files,
)

_EMBEDDING = "embed_tokens.weight"
"""End of the name of the weight that an LM head may share."""


def complete(manifest: CheckpointManifest, weights: WeightsCopy, path: str) -> WeightsCopy:
    """Return the weights of a checkpoint; an imported one gets the weights that it lacks.

    Args:
        manifest: the checkpoint's manifest.
        weights: the weights that its files contain.
        path: folder of the base model.

    Raises:
        InvalidRequest: an imported adapter does not fit the base model.
    """
    if manifest.imported is None or weights.lora is None:
        return weights
    copies = {name for name in weights.tensors if name.endswith(BASE_COPY)}
    if copies:
        _check_copies({name: weights.tensors[name] for name in copies}, path)
    with BUILDING:
        targets = read_architecture(path).targets
    own = {name: each for name, each in weights.tensors.items() if name not in copies}
    return replace(weights, tensors=imported_adapters.complete(own, targets, weights.lora))


def _check_copies(copies: Mapping[str, Tensor], path: str) -> None:
    """Check that copies of base weights equal them, apart from rounding to another dtype.

    Raises:
        InvalidRequest: one differs, or the base model's weights can't be read here.
    """
    try:
        stored = stored_tensors(weight_files(path))
    except UnreadableWeights:
        stored = {}
    for name, copy in copies.items():
        base = _base_weight(stored, name.removesuffix(BASE_COPY))
        if base is None or not _is_equal(copy, base):
            raise InvalidRequest(
                f"the imported adapter has a copy of a base weight, {name!r}, that"
                f" {'differs from the base model' if base else 'cannot be compared here'}; if the"
                " weight was not trained, save the adapter with"
                " save_pretrained(..., save_embedding_layers=False)"
            )


def _base_weight(stored: Mapping[str, StoredTensor], module: str) -> StoredTensor | None:
    own = stored.get(f"{module}.weight")
    if own is not None:
        return own
    # The LM head of a model with tied embeddings is in its files under one name only.
    return next((stored[name] for name in stored if name.endswith(_EMBEDDING)), None)


def _is_equal(copy: Tensor, base: StoredTensor) -> bool:
    if copy.shape != base.shape:
        return False
    content = bytearray(base.read(0, base.size))
    weight = torch.frombuffer(content, dtype=base.dtype).view(base.shape)
    return torch.equal(copy, weight.to(copy.dtype)) or torch.equal(copy.to(base.dtype), weight)
