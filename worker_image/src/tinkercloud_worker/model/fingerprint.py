"""The fingerprint of a base model, which must match where a training run resumes.

It covers the name, shape and dtype of every tensor in the weight files, samples of its values, and
the fields of config.json that affect computation. It does not depend on the location of the folder,
the distribution of tensors over files, the tokenizer, or the compute dtype of a session head. A
copy in float8 or another dtype has different values and a different fingerprint.

Values are read at 16 places per tensor, 4 KiB each, so tensors of up to 64 KiB are covered
entirely. Models with very many tensors use fewer places per tensor, so that at most about 100 MB
are read. Training changes nearly all values of a model and is detected; a change of a few values in
a large tensor may not be.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tinkercloud_protocol.adapters.fingerprints import BaseFingerprint
from tinkercloud_worker.model.architecture import is_tied, read_config
from tinkercloud_worker.model.quantized import files_read
from tinkercloud_worker.model.weight_files import (
    StoredTensor,
    has_weights,
    stored_tensors,
)

_PLACES = 16
_MOST_PLACES = 25_000
"""Maximum number of places over all tensors, unless there are more tensors."""
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
"""Configuration fields that do not affect the logits of text."""


def fingerprint_of(path: str) -> str | None:
    """Return the fingerprint of a model folder; None if it has no weights.

    Args:
        path: the folder, whose weights have been checked (`weights_check`).

    Raises:
        UnsupportedModelError: transformers does not know the model.
        UnreadableWeights: weight files are missing or damaged.
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
        # Some copies contain it twice.
        digests.pop(_HEAD, None)
    return str(BaseFingerprint(_hash(effective(config)), _hash(digests)))


def _hash(content: Mapping[str, Any]) -> str:
    encoded = json.dumps(content, sort_keys=True, default=str).encode()
    return hashlib.sha256(encoded).hexdigest()[:_DIGITS]


def effective(config: Any) -> dict[str, Any]:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the fields of a configuration that affect computation.

    Defaults are omitted, so that new fields in a transformers version, or defaults spelled out in a
    configuration, make no difference.
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
"""The size of a tensor in bytes, and a function that reads a number of bytes at an offset."""


def _digest(dtype: str, shape: tuple[int, ...], reader: Reader, places: int) -> str:
    size, read = reader
    found = hashlib.sha256(f"{dtype}{shape}".encode())
    if size <= places * _PLACE_BYTES:
        found.update(read(0, size))
        return found.hexdigest()
    for place in range(places):
        # The last place is at the end; a single place is in the middle.
        start = (size - _PLACE_BYTES) * (2 * place + 1) // (2 * places)
        found.update(read(start, _PLACE_BYTES))
    return found.hexdigest()


def _reader(tensor: Tensor) -> Reader:
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    return len(raw), lambda start, size: raw[start : start + size].numpy().tobytes()
