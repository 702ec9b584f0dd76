"""LoRA: which tensors an adapter has, their initial values, and their names in PEFT files.

For a frozen weight W [out, in] an adapter adds (alpha / rank) * B @ A, with A [rank, in] and
B [out, rank]. Alpha is 32 whatever the rank ("LoRA Without Regret"); it is not on the wire.
A begins uniform in +-1/sqrt(in) (PEFT's kaiming_uniform with a = sqrt 5), B at zero, so that a
fresh adapter is the base model exactly. Each A has its own random stream, keyed by the seed and
the weight's name: its values do not depend on which other weights are adapted, nor on how the
model is split over ranks.

The experts of a layer have adapters of the same rank as any other weight. What lies at the hidden
states is one for all of them, as in Tinker: A of gates and ups [1, rank, in], B of downs
[1, out, rank]. The other half each has for itself, stacked in one tensor: B [experts, out, rank],
A [experts, rank, in]. So there are as many numbers as `get_lora_param_count` of `tinker_cookbook`
says, which learning rates are chosen by.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_worker.lora.parameters import Layout, TensorSpec

ALPHA = 32.0
_PEFT_PREFIX = "base_model.model."
_EXPERTS = ".experts."
_DOWNS = frozenset({"down_proj", "w2"})
"""Leaves of experts' names that lead back to hidden states; all others come from them."""
_LANGUAGE_MODEL = "language_model."
"""Part of a vision-language model's names: the towers next to it have layers of the same names."""
_NUMBERED = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")

Group = Literal["attention", "mlp", "unembed"]


@dataclass(frozen=True, slots=True)
class Target:
    """A weight of the base model that can be adapted."""

    name: str
    """Qualified module name in the Hugging Face model, such as `model.layers.0.mlp.up_proj`."""
    in_features: int
    out_features: int
    group: Group
    experts: int = 0
    """How many experts have such a weight, stacked in one tensor; 0: it is not of experts."""

    @property
    def a_name(self) -> str:
        """Name of its A [rank, in], of experts stacked."""
        return f"{self.name}.lora_A.weight"

    @property
    def b_name(self) -> str:
        """Name of its B [out, rank], of experts stacked."""
        return f"{self.name}.lora_B.weight"

    @property
    def own_name(self) -> str:
        """Name of the half that each expert has for itself; the other is shared in a layer."""
        return self.b_name if _is_shared(self.a_name) else self.a_name

    def specs(self, rank: int) -> list[TensorSpec]:
        """Return its A and its B."""
        shapes = {
            self.a_name: (rank, self.in_features),
            self.b_name: (self.out_features, rank),
        }
        return [TensorSpec(name, (*self._stacked(name), *shape)) for name, shape in shapes.items()]

    def _stacked(self, name: str) -> tuple[int, ...]:
        if not self.experts:
            return ()
        return (self.experts if name == self.own_name else 1,)


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
    return Layout(spec for target in targets for spec in target.specs(rank))


def initial_a(target: Target, rank: int, seed: int) -> Tensor:
    """Return the initial A of a target, whole, on the CPU."""
    a, _ = target.specs(rank)
    bound = 1.0 / math.sqrt(target.in_features)
    # Drawn on the CPU, so that a seed means the same values on every device.
    return torch.empty(a.shape).uniform_(-bound, bound, generator=_generator(seed, target.name))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _is_shared(name: str) -> bool:
    """Whether all experts of a layer share the tensor of this name."""
    leaf, half, _ = name.rsplit(".", 2)
    return half == ("lora_B" if leaf.rpartition(".")[2] in _DOWNS else "lora_A")


def to_archive_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as archives of checkpoints do: as PEFT, but those of experts are stacked.

    So are Tinker's, which `tinker_cookbook.weights` merges, or takes apart for PEFT.
    """
    return {_PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}


def from_archive_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `to_archive_names`."""
    return {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in tensors.items()}


def to_peft_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as PEFT writes them, each expert's by itself, and what they share with each.

    The seventh expert's are `...mlp.experts.7.gate_proj.lora_A.weight` and so on, the names that
    its layers have in checkpoints: vLLM, SGLang and PEFT look for those, whatever they make of them
    (of Mixtral `...block_sparse_moe.experts.7.w1.lora_A.weight`).
    """
    named = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            named[_PEFT_PREFIX + name] = tensor
            continue
        before, after = name.rsplit(_EXPERTS, 1)
        for number in range(max(len(tensor), len(tensors[_other_half(name)]))):
            # What is shared lies in a file as often as it has names.
            own = tensor[0].clone() if _is_shared(name) else tensor[number]
            named[f"{_PEFT_PREFIX}{before}{_EXPERTS}{number}.{after}"] = own
    return named


def _other_half(name: str) -> str:
    a, b = ".lora_A.", ".lora_B."
    return name.replace(a, b) if a in name else name.replace(b, a)


def from_peft_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `to_peft_names`.

    Raises:
        InvalidRequest: experts are missing, are of several shapes, or differ in what all of a layer
            share here.
    """
    named: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(_PEFT_PREFIX)
        if found := _NUMBERED.fullmatch(name):
            experts[found[1] + found[3]][int(found[2])] = tensor
        else:
            named[name] = tensor
    for name, parts in experts.items():
        shapes = {part.shape for part in parts.values()}
        if len(shapes) > 1 or parts.keys() != set(range(len(parts))):
            raise InvalidRequest(
                f"adapter: {name!r} is there of experts {sorted(parts)[:9]}... in shapes"
                f" {[list(shape) for shape in shapes][:3]}; every expert from 0 on must have one,"
                " all of one shape"
            )
        if not _is_shared(name):
            named[name] = torch.stack([parts[number] for number in range(len(parts))])
        elif all(torch.equal(part, parts[0]) for part in parts.values()):
            named[name] = parts[0].unsqueeze(0)
        else:
            raise InvalidRequest(
                f"adapter: {name!r} is not the same of all experts; adapters are taken whose"
                " experts share A of gates and ups, and B of downs"
            )
    return named


def peft_config(config: LoraConfig, names: Iterable[str], base_model: str) -> bytes:
    """Return `adapter_config.json` for an adapter with these tensor names.

    PEFT, vLLM and SGLang match `target_modules` against the end of module names. PEFT would find
    such modules in a vision tower too, unless they are excluded.
    """
    modules = {name.removesuffix(".lora_A.weight") for name in names if ".lora_A." in name}
    content: dict[str, object] = {
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
    if any(_LANGUAGE_MODEL in module for module in modules):
        content["exclude_modules"] = rf"(?!.*{re.escape(_LANGUAGE_MODEL)}|lm_head).*"
    return json.dumps(content, indent=2).encode()
