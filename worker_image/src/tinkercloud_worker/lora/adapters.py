"""LoRA: which tensors an adapter has, their initial values, and their names in PEFT files.

For a frozen weight W [out, in] an adapter adds (alpha / rank) * B @ A, with A [rank, in] and B
[out, rank]. Alpha is 32 for every rank ("LoRA Without Regret"); it is not part of the wire format.
A is initialized uniformly in +-1/sqrt(in) (PEFT's kaiming_uniform with a = sqrt 5) and B with
zeros, so a new adapter computes exactly the base model. Each A has its own random stream, keyed by
the seed and the weight's name: its values depend neither on which other weights are adapted nor on
how the model is split over ranks.

The experts of a layer have adapters of the same rank as any other weight. As in Tinker, they share
the half next to the hidden states: A of the gate and up projections [1, rank, in], B of the down
projection [1, out, rank]. Each expert has its own other half, stacked in one tensor: B [experts,
out, rank], A [experts, rank, in]. The number of parameters therefore equals `get_lora_param_count`
of `tinker_cookbook`, which is used to choose learning rates.
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

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.lora.parameters import TensorLayout, TensorSpec

ALPHA = 32.0
_PEFT_PREFIX = "base_model.model."
_EXPERTS = ".experts."
_DOWNS = frozenset({"down_proj", "w2"})
"""Leaf names of expert weights that map to hidden states; all others map from them."""
_LANGUAGE_MODEL = "language_model."
"""Part of the names in a vision-language model, whose other towers have layers of the same
names."""
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
    """Number of experts whose weights are stacked in one tensor; 0: not an expert weight."""

    @property
    def a_name(self) -> str:
        """Name of its A [rank, in]; stacked for experts."""
        return f"{self.name}.lora_A.weight"

    @property
    def b_name(self) -> str:
        """Name of its B [out, rank]; stacked for experts."""
        return f"{self.name}.lora_B.weight"

    @property
    def own_name(self) -> str:
        """Name of the half that each expert has separately; a layer shares the other half."""
        return self.b_name if _is_shared(self.a_name) else self.a_name

    def specs(self, rank: int) -> list[TensorSpec]:
        """Return the specs of A and B."""
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
    """Return the scaling factor of B @ A."""
    return ALPHA / rank


def select(targets: Iterable[Target], config: LoraConfig) -> list[Target]:
    """Return the targets selected by the switches of the configuration.

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
            "lora_config: train_attn, train_mlp and train_unembed select no weight of this"
            " model; set at least one more of them to true"
        )
    return selected


def layout(targets: Iterable[Target], rank: int) -> TensorLayout:
    """Return the flat layout of an adapter."""
    return TensorLayout(spec for target in targets for spec in target.specs(rank))


def initial_a(target: Target, rank: int, seed: int) -> Tensor:
    """Return the full initial A of a target, on the CPU."""
    a, _ = target.specs(rank)
    bound = 1.0 / math.sqrt(target.in_features)
    # Generated on the CPU, so that a seed gives the same values on every device.
    return torch.empty(a.shape).uniform_(-bound, bound, generator=_generator(seed, target.name))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _is_shared(name: str) -> bool:
    """Whether all experts of a layer share the tensor of this name."""
    leaf, half, _ = name.rsplit(".", 2)
    return half == ("lora_B" if leaf.rpartition(".")[2] in _DOWNS else "lora_A")


def to_archive_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as in checkpoint archives: PEFT's names, with expert tensors stacked.

    Tinker's archives have the same layout; `tinker_cookbook.weights` merges them or unstacks them
    for PEFT.
    """
    return {_PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}


def from_archive_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `to_archive_names`."""
    return {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in tensors.items()}


def to_peft_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as PEFT does, with one entry per expert and shared tensors repeated for each.

    Expert 7 has `...mlp.experts.7.gate_proj.lora_A.weight` and so on (in Mixtral
    `...block_sparse_moe.experts.7.w1.lora_A.weight`): the names of its layers in checkpoints, which
    vLLM, SGLang and PEFT look up.
    """
    named = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            named[_PEFT_PREFIX + name] = tensor
            continue
        before, after = name.rsplit(_EXPERTS, 1)
        for number in range(max(len(tensor), len(tensors[_other_half(name)]))):
            # A file stores a shared tensor once for each of its names.
            own = tensor[0].clone() if _is_shared(name) else tensor[number]
            named[f"{_PEFT_PREFIX}{before}{_EXPERTS}{number}.{after}"] = own
    return named


def _other_half(name: str) -> str:
    a, b = ".lora_A.", ".lora_B."
    return name.replace(a, b) if a in name else name.replace(b, a)


def from_peft_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `to_peft_names`.

    Raises:
        InvalidRequest: experts are missing, have different shapes, or differ in a half that the
            experts of a layer must share.
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
                f"adapter: {name!r} has experts {sorted(parts)[:9]}... with shapes"
                f" {[list(shape) for shape in shapes][:3]}; it must have all experts from 0 on,"
                " with equal shapes"
            )
        if not _is_shared(name):
            named[name] = torch.stack([parts[number] for number in range(len(parts))])
        elif all(torch.equal(part, parts[0]) for part in parts.values()):
            named[name] = parts[0].unsqueeze(0)
        else:
            raise InvalidRequest(
                f"adapter: {name!r} differs between experts; the experts of a layer must share A of"
                " the gate and up projections, and B of the down projection"
            )
    return named


def peft_config(config: LoraConfig, names: Iterable[str], base_model: str) -> bytes:
    """Return `adapter_config.json` for an adapter with these tensor names.

    PEFT, vLLM and SGLang match `target_modules` against the end of module names. The vision tower
    is excluded because PEFT would match its modules too.
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
