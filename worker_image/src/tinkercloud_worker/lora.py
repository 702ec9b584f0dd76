"""LoRA: which tensors an adapter has, how they begin, how they are named in PEFT files.

For a frozen weight W [out, in] an adapter adds (alpha / rank) * B @ A, with A [rank, in] and
B [out, rank]. Alpha is 32 whatever the rank ("LoRA Without Regret"); it is not on the wire.
A begins uniform in +-1/sqrt(in) (PEFT's kaiming_uniform with a = sqrt 5), B at zero, so that a
fresh adapter is the base model exactly. Each A has its own random stream, keyed by the seed and
the weight's name: its values do not depend on which other weights are adapted, nor on how the
model is split over ranks.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.training import LoraConfig
from tinkercloud_worker.engine.parameters import Layout, TensorSpec

ALPHA = 32.0
_PEFT_PREFIX = "base_model.model."

Group = Literal["attention", "mlp", "unembed"]


@dataclass(frozen=True, slots=True)
class Target:
    """A weight of the base model that can be adapted."""

    name: str
    """Qualified module name in the Hugging Face model, such as `model.layers.0.mlp.up_proj`."""
    in_features: int
    out_features: int
    group: Group

    @property
    def a_name(self) -> str:
        """Name of its A [rank, in]."""
        return f"{self.name}.lora_A.weight"

    @property
    def b_name(self) -> str:
        """Name of its B [out, rank]."""
        return f"{self.name}.lora_B.weight"


def scale(rank: int) -> float:
    """Return the factor of B @ A."""
    return ALPHA / rank


def select(targets: Iterable[Target], config: LoraConfig) -> list[Target]:
    """Return the targets that the configuration's switches name.

    Raises:
        InvalidRequest: the switches select nothing in this model.
    """
    wanted = {
        "attention": config.train_attn,
        "mlp": config.train_mlp,
        "unembed": config.train_unembed,
    }
    selected = [target for target in targets if wanted[target.group]]
    if not selected:
        raise InvalidRequest(
            "lora_config selects no weight of this model; set another of train_attn, train_mlp,"
            " train_unembed"
        )
    return selected


def layout(targets: Iterable[Target], rank: int) -> Layout:
    """Return the flat layout of an adapter."""
    specs = []
    for target in targets:
        specs.append(TensorSpec(target.a_name, (rank, target.in_features)))
        specs.append(TensorSpec(target.b_name, (target.out_features, rank)))
    return Layout(specs)


def initialize(tensors: Mapping[str, Tensor], targets: Iterable[Target], seed: int) -> None:
    """Write the initial values into an adapter's tensors."""
    with torch.no_grad():
        for target in targets:
            a = tensors[target.a_name]
            bound = 1.0 / math.sqrt(target.in_features)
            # Drawn on the CPU, so that a seed means the same values on every device.
            drawn = torch.empty(a.shape)
            a.copy_(drawn.uniform_(-bound, bound, generator=_generator(seed, target.name)))
            tensors[target.b_name].zero_()


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def to_peft_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors as PEFT writes them."""
    return {_PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}


def from_peft_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `to_peft_names`."""
    return {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in tensors.items()}


def peft_config(config: LoraConfig, names: Iterable[str], base_model: str) -> bytes:
    """Return `adapter_config.json` for an adapter with these tensor names.

    PEFT, vLLM and SGLang match `target_modules` against the end of module names.
    """
    modules = {name.removesuffix(".lora_A.weight") for name in names if ".lora_A." in name}
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }
    return json.dumps(content, indent=2).encode()
