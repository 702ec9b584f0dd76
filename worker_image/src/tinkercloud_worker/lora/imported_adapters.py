"""Adapters that were not trained here: brings their tensors into the form of our own.

A PEFT adapter may have another alpha, lower precision, and only some of the weights that the
switches of a `LoraConfig` select. Our form has a fixed alpha, float32, and all weights of each
selected group. B takes up the difference in scale, and missing weights get a new, untrained A and a
B of zeros. So the adapter computes the same, and all of the group is trained from then on.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tinkercloud_protocol.adapters.peft import BASE_COPY, plain_name
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.lora.adapters import Target


def from_file(tensors: Mapping[str, Tensor], scale: float, rank: int) -> dict[str, Tensor]:
    """Return the tensors of an imported file by our names, in float32 and with our alpha.

    Args:
        tensors: tensors by PEFT's names, of any floating dtype; experts one by one or stacked.
            Copies of base weights keep their dtype.
        scale: factor of B @ A that the adapter was trained with.
        rank: rank of the adapter.

    Raises:
        InvalidRequest: experts are missing, or differ in a half that they must share.
    """
    factor = scale / adapters.scale(rank)
    scaled = {}
    for full_name, tensor in tensors.items():
        name = plain_name(full_name)
        if name.endswith(BASE_COPY):
            scaled[name] = tensor
        else:
            scaled[name] = tensor.float() * factor if ".lora_B." in name else tensor.float()
    return adapters.from_peft_names(scaled)


def complete(
    tensors: Mapping[str, Tensor], targets: Iterable[Target], config: LoraConfig
) -> dict[str, Tensor]:
    """Return an adapter with all weights that its configuration selects.

    Args:
        tensors: tensors of an imported adapter by our names.
        targets: all weights of the base model that can be adapted.
        config: configuration of the adapter.

    Raises:
        InvalidRequest: the adapter has weights that this model does not have or does not adapt, or
            matrices of another shape.
    """
    selected = adapters.select(targets, config)
    layout = adapters.layout(selected, config.rank)
    if unknown := sorted(tensors.keys() - set(layout.names())):
        raise InvalidRequest(
            f"the imported adapter has weights that can't be adapted in this model: {unknown[0]!r}"
            f" and {len(unknown) - 1} more; check that it was trained on this base model"
            " (embeddings and routers are never adapted)"
        )
    added = {}
    for target in selected:
        if target.a_name not in tensors:
            added[target.a_name] = adapters.initial_a(target, config.rank, config.seed or 0)
            added[target.b_name] = torch.zeros(target.specs(config.rank)[1].shape)
    whole = {**tensors, **added}
    layout.check(whole, "the imported adapter")
    return whole
