"""Weights as files for other programs: PEFT's for an adapter, a Hugging Face folder for a model."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from tinkercloud_protocol.heads.checkpoint_manifest import FULL_WEIGHTS
from tinkercloud_protocol.heads.launch import BaseModelSource
from tinkercloud_worker.checkpoints import formats, tensor_file
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.model.architecture import as_in_files

_CONFIG = "config.json"
_COPIED = (
    "added_tokens.json",
    "chat_template.*",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.*",
)
"""Files of a base model that its fine-tuned models share, such as the tokenizer's."""


def encode(weights: WeightsCopy, base: BaseModelSource, dtype: str) -> formats.Files:
    """Return the files.

    An adapter has the names and layout of Tinker's archives (`formats.encode_weights`). A full
    model is rounded to the dtype that it computes in, as when it is sampled from.

    Args:
        weights: the trained weights.
        base: the base model, whose folder may lack the weights.
        dtype: name of the torch dtype of a full model's file.
    """
    if weights.lora is not None:
        return formats.encode_weights(weights, base.name)
    folder = Path(base.path)
    rounded = {name: each.to(getattr(torch, dtype)) for name, each in weights.tensors.items()}
    return {
        **dict(_shared_files(folder)),
        _CONFIG: _config(folder, dtype),
        FULL_WEIGHTS: tensor_file.encode(as_in_files(base.path, rounded)),
    }


def _shared_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for pattern in _COPIED:
        for file in folder.glob(pattern):
            if file.is_file():
                yield file.name, file.read_bytes()


def _config(folder: Path, dtype: str) -> bytes:
    content = json.loads((folder / _CONFIG).read_bytes())
    # The trained weights are not quantized, even if the files of the base are.
    content.pop("quantization_config", None)
    for key in ("dtype", "torch_dtype"):
        if key in content:
            content[key] = dtype
    return json.dumps(content, indent=2).encode()
