"""Tensors in the requests that SGLang takes them in.

SGLang reads one format: a pickle restricted to a list of allowed names. It is written here and
never read, and names tensors, sizes and dtypes alone. Tensors are passed by value, or, to an engine
on the same machine, as handles of shared memory.
"""

import base64
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import torch
from safetensors import safe_open
from torch import Tensor

Tensors = Mapping[str, Tensor]
_QUERIES, _KEYS_AND_VALUES = ".q_a_proj.", ".kv_a_proj_with_mqa."


def request_body(fields: Mapping[str, Any], tensors: Tensors, ranks: int) -> bytes:
    """Return a request that carries tensors, as JSON. Slow for many bytes.

    Args:
        fields: the rest of the request.
        tensors: at least one.
        ranks: of the engine; each reads a copy of its own.
    """
    copies = [base64.b64encode(pickled_bucket(tensors)).decode()] * ranks
    carried = {"serialized_named_tensors": copies, "load_format": "flattened_bucket"}
    return orjson.dumps({**fields, **carried})


def pickled_bucket(tensors: Tensors) -> bytes:
    """Return a pickled flattened bucket that carries its bytes."""
    ordered, flat = flatten(tensors)
    return pickle.dumps(bucket(ordered, flat), protocol=4)


def bucket(ordered: Tensors, flat: Tensor) -> dict[str, Any]:
    """Return what SGLang calls a flattened bucket: one flat tensor of bytes, and what lies where.

    Args:
        ordered: the tensors in the order in which they lie.
        flat: their bytes, uint8 [total size], on any device.
    """
    metadata, start = [], 0
    for name, tensor in ordered.items():
        end = start + tensor.nbytes
        span = {"start_idx": start, "end_idx": end, "numel": tensor.nbytes}
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **span))
        start = end
    return {"flattened_tensor": flat, "metadata": metadata}


def flatten(tensors: Tensors) -> tuple[dict[str, Tensor], Tensor]:
    """Lay tensors one after another, as SGLang cuts them out again.

    Args:
        tensors: at least one.

    Returns:
        The tensors in the order in which they lie, and their bytes, uint8 [total size], on the CPU.
    """
    # A slice is viewed as its dtype, so it must begin at a multiple of that one's size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    parts = [tensor.detach().cpu().flatten().view(torch.uint8) for tensor in ordered.values()]
    return ordered, torch.cat(parts)


def buckets(path: Path, most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Read a safetensors file part by part.

    Args:
        path: of the file.
        most_bytes: of a part, unless what must be in one is larger.
    """
    part: dict[str, Tensor] = {}
    size = 0
    with safe_open(path, framework="pt") as file:
        for names in _grouped(file.keys()):
            tensors = {name: file.get_tensor(name) for name in names}
            more = sum(tensor.nbytes for tensor in tensors.values())
            if part and size + more > most_bytes:
                yield part
                part, size = {}, 0
            part |= tensors
            size += more
    if part:
        yield part


def _grouped(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield names in alphabetical order, grouped where SGLang takes several only together.

    It fuses the two down-projections of a layer of latent attention, of queries and of keys and
    values, and drops one that arrives without the other.
    """
    left = set(names)
    for name in sorted(left):
        one, other = _QUERIES, _KEYS_AND_VALUES
        together = {name, name.replace(one, other), name.replace(other, one)} & left
        left -= together
        if together:
            yield sorted(together)
