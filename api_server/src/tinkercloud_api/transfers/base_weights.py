"""Reads the names and shapes of a base model's weights, if its folder is on this machine."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tinkercloud_protocol.adapters.adapter_fit import BaseWeights
from tinkercloud_protocol.adapters.peft import LENGTH_BYTES, MAX_HEADER_BYTES

_WEIGHT = ".weight"
_KV_SHARED = "num_kv_shared_layers"
_MATRIX = 2
"""Number of dimensions."""


def read_base(folder: Path) -> BaseWeights:
    """Return what a model's folder says about its weights. Blocks.

    Nothing is known of what can't be read: the head names the problem when it loads the model.
    """
    try:
        changed = (folder / "config.json").stat().st_mtime_ns
    except OSError:
        changed = None
    return _read(folder, changed)


@lru_cache(maxsize=64)
def _read(folder: Path, _changed: int | None) -> BaseWeights:
    """Read a folder once for each time at which its configuration was written."""
    text = _text_config(folder / "config.json")
    number, shared = text.get("num_hidden_layers", text.get("n_layer")), _KV_SHARED
    return BaseWeights(
        number if type(number) is int else None,
        _shapes(folder),
        text[shared] if type(text.get(shared)) is int else 0,
    )


def _text_config(config: Path) -> dict[str, Any]:
    try:
        content = json.loads(config.read_bytes())
        text = content.get("text_config") or content
    except (OSError, ValueError, AttributeError):
        return {}
    return text if isinstance(text, dict) else {}


def _shapes(folder: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            shape = entry.get("shape") if isinstance(entry, dict) else None
            if isinstance(shape, list) and len(shape) == _MATRIX and name.endswith(_WEIGHT):
                shapes[name.removesuffix(_WEIGHT)] = shape
    return shapes


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(LENGTH_BYTES), "little")
            header = json.loads(content.read(size)) if size <= MAX_HEADER_BYTES else {}
    except (OSError, ValueError):
        return {}
    return header if isinstance(header, dict) else {}
