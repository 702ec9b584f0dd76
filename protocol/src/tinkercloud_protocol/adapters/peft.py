"""Adapters of Hugging Face PEFT, as far as they can be read without their tensors.

An adapter folder has two files: `adapter_config.json` and `adapter_model.safetensors`. The
configuration and the header of the second file, which lists names, shapes and dtypes, decide
whether the adapter can be imported. Whether it fits its base model is known where that model is.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import describe

MAX_HEADER_BYTES = 32 << 20
"""Maximum size of the header of an imported file: about 200,000 tensors."""
LENGTH_BYTES = 8
"""Size of the field with the header's length, at the start of a safetensors file."""
MAX_RANK = 1024
MAX_ALPHA = 1e6
_PREFIX = "base_model.model."
BASE_COPY = ".base_layer.weight"
"""End of the name of a copy of a base weight, which PEFT saves along with an adapter of it if it is
the weight of the LM head."""
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.default)?\.weight")
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Sizes of the dtypes that are accepted, by their names in safetensors files."""
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_dtype",
        "lorap_emb_lr",
        "lorap_lr_ratio",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
"""Fields that are checked one by one, or that do not change what a saved adapter computes.

ms-swift writes those of its training: `lora_dtype`, `lorap_emb_lr` and `lorap_lr_ratio`.
"""
_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {}, {"ephemeral_gpu_offload": False})
"""Values with which other fields have no effect; the last one is the default of
`runtime_config`."""
_KEEPS_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights unchanged."""
_OTHER_TENSORS = (
    ("lora_magnitude_vector", "it belongs to DoRA (use_dora), which is not supported"),
    ("lora_embedding_", "adapters of embeddings are not supported; train without embed_tokens"),
    ("modules_to_save", "modules_to_save is not supported; train with LoRA alone"),
    (".bias", "trained biases are not supported; train with bias='none'"),
    (
        "",
        "it is not a LoRA matrix; if it is a copy of a base weight, save the adapter with"
        " save_pretrained(..., save_embedding_layers=False)",
    ),
)
"""Parts of the names of other tensors, and why a file that has them is rejected."""
_SHOWN = 3

Count = Annotated[int, Field(ge=0)]
_Names = str | list[Annotated[str, Field(min_length=1)]]


class _Fields(BaseModel):
    """Fields whose type decides what PEFT computes: it takes any true value for `true`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    r: Annotated[int, Field(ge=1, le=MAX_RANK)]
    lora_alpha: Annotated[int | float, Field(gt=0, le=MAX_ALPHA)]
    use_rslora: bool | None = None
    fan_in_fan_out: bool | None = None
    init_lora_weights: bool | str | None = None
    target_modules: _Names | None = None
    exclude_modules: _Names | None = None
    layers_to_transform: Count | list[Count] | None = None
    layers_pattern: _Names | None = None


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of `adapter_config.json` that decides what an adapter computes."""

    rank: int
    scale: float
    """Factor of B @ A."""


class _Entry(BaseModel):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


_HEADER = TypeAdapter(dict[str, _Entry])


_BOOLEAN, _NAMES = "expected true or false", "expected a string, or a list of strings"
_EXPECTED = {
    "r": f"expected a whole number from 1 to {MAX_RANK}",
    "lora_alpha": f"expected a positive number up to {MAX_ALPHA:g}",
    "use_rslora": _BOOLEAN,
    "fan_in_fan_out": _BOOLEAN,
    "init_lora_weights": "expected true, false or a string",
    "target_modules": _NAMES,
    "exclude_modules": _NAMES,
    "layers_to_transform": "expected the number of a layer, or a list of them",
    "layers_pattern": _NAMES,
}
"""What is accepted in each of `_Fields`, for messages."""


def read_config(content: Mapping[str, Any]) -> AdapterConfig:
    """Read the configuration of an adapter.

    Args:
        content: the parsed `adapter_config.json`.

    Raises:
        InvalidRequest: a field has a value that changes what the adapter computes in a way that is
            not supported; the message names it.
    """
    kind, task = content.get("peft_type"), content.get("task_type")
    if kind != "LORA":
        raise _refused("peft_type", kind, "only 'LORA' can be imported")
    if task is not None and task != "CAUSAL_LM":
        raise _refused("task_type", task, "only adapters of 'CAUSAL_LM' models can be imported")
    if content.get("bias", "none") != "none":
        raise _refused("bias", content["bias"], "trained biases are not supported; use 'none'")
    for name, value in sorted(content.items()):
        if name not in _WITHOUT_EFFECT and value not in _NEUTRAL:
            raise _refused(name, value, "it is not supported; import a plain LoRA adapter")
    try:
        fields = _Fields.model_validate(content)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise _refused(name, content.get(name), _EXPECTED[name]) from None
    if fields.init_lora_weights not in _KEEPS_THE_BASE:
        raise _refused(
            "init_lora_weights",
            fields.init_lora_weights,
            "it changes the base weights; convert the adapter to plain LoRA first"
            " (save_pretrained with path_initial_model_for_weight_conversion)",
        )
    divisor = math.sqrt(fields.r) if fields.use_rslora else fields.r
    return AdapterConfig(fields.r, fields.lora_alpha / divisor)


def header_bytes(start: bytes) -> int:
    """Return where the tensors of a safetensors file begin.

    Args:
        start: the first bytes of the file, at least `LENGTH_BYTES` of them.

    Raises:
        InvalidRequest: the header would be longer than `MAX_HEADER_BYTES`.
    """
    size = int.from_bytes(start[:LENGTH_BYTES], "little")
    if not 0 < size <= MAX_HEADER_BYTES:
        raise InvalidRequest(
            f"adapter_model.safetensors: its header would have {size} bytes, of at most"
            f" {MAX_HEADER_BYTES}; the file is not a safetensors file of an adapter"
        )
    return LENGTH_BYTES + size


def read_header(start: bytes, size_bytes: int, rank: int) -> LoraConfig:
    """Return the configuration of the adapter in a file, from the file's start.

    Args:
        start: the start of the file, up to its tensors.
        size_bytes: size of the whole file.
        rank: rank according to the configuration.

    Raises:
        InvalidRequest: the file is not a safetensors file of a LoRA adapter of this rank.
    """
    entries = _entries(start)
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        _check_entry(name, entry, end)
        end = entry.data_offsets[1]
    if end != size_bytes - len(start):
        raise InvalidRequest(
            f"adapter_model.safetensors: its tensors have {end} bytes, but the file has"
            f" {size_bytes - len(start)} after its header; it is incomplete or damaged"
        )
    modules = _modules({name: entry.shape for name, entry in entries.items()}, rank)
    return LoraConfig(
        rank=rank,
        seed=0,
        train_unembed=any(_group(module) == "unembed" for module in modules),
        train_mlp=any(_group(module) == "mlp" for module in modules),
        train_attn=any(_group(module) == "attention" for module in modules),
    )


def tensors_of(start: bytes) -> list[tuple[str, str, Sequence[int], range]]:
    """Return the tensors in a header that `read_header` accepts, in the order of their bytes.

    Args:
        start: the start of the file, up to its tensors.

    Returns:
        Name, dtype, shape and place of each; places count from the end of the header.
    """
    entries = sorted(_entries(start).items(), key=lambda item: item[1].data_offsets)
    return [(name, each.dtype, each.shape, range(*each.data_offsets)) for name, each in entries]


def plain_name(name: str) -> str:
    """Return the name of a tensor without PEFT's prefix and without an adapter's name."""
    plain = name.removeprefix(_PREFIX)
    found = _HALF.fullmatch(plain)
    return plain if found is None else f"{found['module']}.lora_{found['half']}.weight"


def _entries(start: bytes) -> dict[str, _Entry]:
    try:
        header = orjson.loads(start[LENGTH_BYTES:])
        if isinstance(header, dict):
            header.pop("__metadata__", None)
        return _HEADER.validate_python(header)
    except ValidationError as error:
        problem = describe(error)
    except ValueError:
        problem = "it is not JSON"
    raise InvalidRequest(f"adapter_model.safetensors: its header is invalid: {problem}")


def _check_entry(name: str, entry: _Entry, begin: int) -> None:
    item = ITEM_BYTES.get(entry.dtype)
    if item is None:
        raise InvalidRequest(
            f"adapter_model.safetensors: {name!r} has dtype {entry.dtype}; accepted are"
            f" {', '.join(ITEM_BYTES)}"
        )
    first, last = entry.data_offsets
    if first != begin or last - first != math.prod(entry.shape) * item:
        raise InvalidRequest(
            f"adapter_model.safetensors: {name!r} has bytes {first} to {last}, which do not match"
            f" its shape {entry.shape} or the tensors before it; the file is damaged"
        )


def _modules(shapes: Mapping[str, Sequence[int]], rank: int) -> set[str]:
    """Return the adapted modules of a file; each must have both matrices, of this rank."""
    halves: dict[str, set[str]] = {"A": set(), "B": set()}
    copies = {name for name in shapes if name.endswith(BASE_COPY)}
    for name in shapes.keys() - copies:
        shape, found = shapes[name], _HALF.fullmatch(name.removeprefix(_PREFIX))
        if found is None:
            why = next(reason for part, reason in _OTHER_TENSORS if part in name)
            raise InvalidRequest(f"adapter_model.safetensors: {name!r}: {why}")
        inner = shape[-2:][0 if found["half"] == "A" else -1] if len(shape) in {2, 3} else None
        if inner != rank:
            raise InvalidRequest(
                f"adapter_model.safetensors: {name!r} has shape {list(shape)}, which does not match"
                f" the rank {rank} (r of adapter_config.json)"
            )
        if found["module"] in halves[found["half"]]:
            raise InvalidRequest(f"adapter_model.safetensors: {name!r} appears twice")
        halves[found["half"]].add(found["module"])
    if single := sorted(halves["A"] ^ halves["B"]):
        raise InvalidRequest(
            f"adapter_model.safetensors: {single[:_SHOWN]} have lora_A or lora_B, but not both"
        )
    for name in copies:
        if name.removeprefix(_PREFIX).removesuffix(BASE_COPY) not in halves["A"]:
            raise InvalidRequest(
                f"adapter_model.safetensors: {name!r} is a copy of a base weight that has no"
                " adapter; save with save_pretrained(..., save_embedding_layers=False)"
            )
    if not halves["A"]:
        raise InvalidRequest("adapter_model.safetensors: it contains no LoRA matrix")
    return halves["A"]


def _group(module: str) -> str:
    """Return which switch of a `LoraConfig` selects a module."""
    if not any(part.isdigit() for part in module.split(".")):
        return "unembed"
    return "attention" if "attn" in module or "attention" in module else "mlp"


def _refused(field: str, value: object, why: str) -> InvalidRequest:
    return InvalidRequest(f"adapter_config.json: {field}: {why} (got {str(value)[:80]!r})")
