"""The fingerprint of a base model: what must be equal where a run continues.

It covers the name, shape and dtype of every tensor in the weight files, samples of its values, and
the fields of config.json that say how the model computes. It does not depend on where the folder
is, on how tensors are divided over files, on the tokenizer, nor on the dtype that a head computes
in. A copy in float8 or in another dtype has other values, and another fingerprint.

Values are read at 16 places of a tensor, 4 KiB each: tensors of up to 64 KiB are covered whole. Of
a model with very many tensors there are fewer places in each, so that about 100 MB are read at
most. Training changes nearly all values of a model, and is noticed; a change of a few values of a
large tensor may not be.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tinkercloud_protocol.fingerprints import BaseFingerprint
from tinkercloud_worker.model.architecture import is_tied, read_config
from tinkercloud_worker.model.quantized import files_read
from tinkercloud_worker.model.weight_files import (
    StoredTensor,
    has_weights,
    stored_tensors,
)

_PLACES = 16
_MOST_PLACES = 25_000
"""In all tensors together, unless there are more tensors."""
_PLACE_BYTES = 4096
_THREADS = 8
_DIGITS = 32
_HEAD = "lm_head.weight"

_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "transformers_weights",
        "use_cache",
    }
)
"""Fields of a configuration that change no logits of a text."""


def fingerprint_of(path: str) -> str | None:
    """Return the fingerprint of a model's folder; None if it has no weights.

    Args:
        path: of the folder, whose weights have been checked (`weights_check`).

    Raises:
        UnsupportedModelError: transformers does not know the model.
        UnreadableWeights: its files are missing or damaged.
    """
    if not has_weights(path):
        return None
    config = read_config(path)
    files = files_read(path, config)
    if files[0].suffix == ".safetensors":
        digests = _digests_of_files(stored_tensors(files))
    else:
        digests = {
            name: _digest(str(tensor.dtype), tuple(tensor.shape), _reader(tensor), _PLACES)
            for file in files
            for name, tensor in torch.load(file, mmap=True, weights_only=True).items()
        }
    if is_tied(config):
        # Some copies have it a second time.
        digests.pop(_HEAD, None)
    return str(BaseFingerprint(_hash(effective(config)), _hash(digests)))


def _hash(content: Mapping[str, Any]) -> str:
    encoded = json.dumps(content, sort_keys=True, default=str).encode()
    return hashlib.sha256(encoded).hexdigest()[:_DIGITS]


def effective(config: Any) -> dict[str, Any]:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the fields of a configuration that say how a model computes.

    Defaults are left out, so that a version of transformers that adds a field, or a configuration
    that spells a default out, makes no difference.
    """
    return {"model_type": config.model_type, **_pruned(config.to_diff_dict())}


def _pruned(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _pruned(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in _WITHOUT_EFFECT
    }


def _digests_of_files(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    places = max(1, min(_PLACES, _MOST_PLACES // len(tensors)))

    def digest(stored: StoredTensor) -> str:
        return _digest(str(stored.dtype), stored.shape, (stored.size, stored.read), places)

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(tensors, pool.map(digest, tensors.values()), strict=True))


Reader = tuple[int, Callable[[int, int], bytes]]
"""Bytes of a tensor, and what returns those from a place on, so many."""


def _digest(dtype: str, shape: tuple[int, ...], reader: Reader, places: int) -> str:
    size, read = reader
    found = hashlib.sha256(f"{dtype}{shape}".encode())
    if size <= places * _PLACE_BYTES:
        found.update(read(0, size))
        return found.hexdigest()
    for place in range(places):
        # The last place is the end; a single one is in the middle.
        start = (size - _PLACE_BYTES) * (2 * place + 1) // (2 * places)
        found.update(read(start, _PLACE_BYTES))
    return found.hexdigest()


def _reader(tensor: Tensor) -> Reader:
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    return len(raw), lambda start, size: raw[start : start + size].numpy().tobytes()
