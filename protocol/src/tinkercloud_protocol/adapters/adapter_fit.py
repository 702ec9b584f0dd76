"""Whether an imported adapter fits its configuration and its base model, by names and shapes.

What is not known here, such as which module of a family can be adapted, is checked by the session
head when it loads the adapter.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from tinkercloud_protocol.adapters import peft
from tinkercloud_protocol.wire.errors import InvalidRequest

_FILE = "adapter_model.safetensors"
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_INDEX = re.compile(r"(?:^|.*?\.)(?P<kind>[^.]*)\.(?P<number>\d+)\.")
"""The first number in a module's name, and what it counts."""
_KEYS_AND_VALUES = (".k_proj", ".v_proj")
_EXPERTS = ".experts."
"""Part of the names of experts, which base models and adapters stack in different ways."""


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """What is known of a base model's weights."""

    num_layers: int | None = None
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Shapes of the matrices in its files, by the name of their module."""
    num_kv_shared_layers: int = 0
    """How many last layers use the keys and values of earlier ones. Files may have projections for
    them (Gemma 3n and 4), but the model has no such modules."""


def check(start: bytes, config: Mapping[str, Any], base: BaseWeights) -> None:
    """Check the tensors of an adapter against its configuration and its base model.

    Args:
        start: the start of its file, up to its tensors, which `peft.read_header` accepts.
        config: its configuration, which `peft.read_config` accepts.
        base: the base model.

    Raises:
        InvalidRequest: PEFT would not read a tensor, a layer does not exist, a shape is not the
            base model's, or layers are missing.
    """
    modules = _modules(start)
    for module, (columns, rows) in sorted(modules.items()):
        if _is_selected(module, config) is False:
            raise InvalidRequest(
                f"{_FILE}: {module!r} has an adapter, but target_modules, exclude_modules and"
                " layers_to_transform of adapter_config.json do not select it, so PEFT would ignore"
                " it; send the two files of one adapter"
            )
        number = _LAYER.search(module)
        if base.num_layers is not None and number and int(number[1]) >= base.num_layers:
            raise InvalidRequest(
                f"{_FILE}: {module!r} is in layer {number[1]}, but the base model has"
                f" {base.num_layers} layers, counted from 0; import it for the model that it was"
                " trained on"
            )
        shape = base.shapes.get(module)
        if shape is not None and sorted(shape) != sorted((columns, rows)):
            raise InvalidRequest(
                f"{_FILE}: the adapter of {module!r} is for a weight of shape {[rows, columns]},"
                f" but that of the base model has {list(shape)}; import it for the model that it"
                " was trained on"
            )
    _check_layers(modules.keys(), config, base)


def _modules(start: bytes) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of each adapted module."""
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for name, _, shape, _ in peft.tensors_of(start):
        if found := _HALF.fullmatch(peft.plain_name(name)):
            outer = shape[-1] if found["half"] == "A" else shape[-2]
            sizes[found["module"]][found["half"]] = outer
    return {module: (halves["A"], halves["B"]) for module, halves in sizes.items()}


def _is_selected(module: str, config: Mapping[str, Any]) -> bool | None:
    """Return whether PEFT adapts a module; None if a pattern decides, which is not run here.

    A pattern of a client may take exponential time.
    """
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if isinstance(excluded, list) and _ends_with(module, excluded):
        return False
    if not isinstance(targets, list):
        return None
    if module in targets:
        return True if not isinstance(excluded, str) or not excluded else None
    if not _ends_with(module, targets):
        return False
    layers, kinds = config.get("layers_to_transform"), config.get("layers_pattern")
    if layers is None or layers == []:
        return True
    found = _INDEX.match(module)
    if kinds and (found is None or found["kind"] not in [kinds, *kinds]):
        return None
    numbers = layers if isinstance(layers, list) else [layers]
    return found is not None and int(found["number"]) in numbers


def _ends_with(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _check_layers(modules: Set[str], config: Mapping[str, Any], base: BaseWeights) -> None:
    """Check that each adapted kind of module is adapted in all selected layers that have it."""
    if base.num_layers is None or config.get("exclude_modules"):
        return
    adapted = {_kind(module) for module in modules if _EXPERTS not in module}
    for module in sorted(base.shapes.keys() - modules):
        number = _LAYER.search(module)
        # Files may have layers for multi-token prediction behind the others.
        is_of_model = number is not None and int(number[1]) < base.num_layers
        if number and int(number[1]) >= base.num_layers - base.num_kv_shared_layers:
            is_of_model = is_of_model and not module.endswith(_KEYS_AND_VALUES)
        if is_of_model and _kind(module) in adapted and _is_selected(module, config):
            raise InvalidRequest(
                f"{_FILE}: {module!r} has no adapter, although target_modules of"
                " adapter_config.json selects it and other layers have one; the file is incomplete"
            )


def _kind(module: str) -> str:
    return _LAYER.sub(".*.", module, count=1)
