"""Encodes tensors for requests to SGLang.

SGLang reads one format: a pickle restricted to a list of allowed names. It is only written here,
never read, and contains names, sizes, dtypes and values of tensors.
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
    """Return a JSON request with tensors. Slow for large tensors.

    Args:
        fields: other fields of the request.
        tensors: at least one tensor.
        ranks: number of ranks of the engine; each gets its own copy.
    """
    copies = [base64.b64encode(pickled_bucket(tensors)).decode()] * ranks
    carried = {"serialized_named_tensors": copies, "load_format": "flattened_bucket"}
    return orjson.dumps({**fields, **carried})


def pickled_bucket(tensors: Tensors) -> bytes:
    """Return a pickled flattened bucket with its bytes."""
    ordered, flat = flatten(tensors)
    metadata, start = [], 0
    for name, tensor in ordered.items():
        end = start + tensor.nbytes
        span = {"start_idx": start, "end_idx": end, "numel": tensor.nbytes}
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **span))
        start = end
    return pickle.dumps({"flattened_tensor": flat, "metadata": metadata}, protocol=4)


def flatten(tensors: Tensors) -> tuple[dict[str, Tensor], Tensor]:
    """Concatenate the bytes of tensors in an order that SGLang can split.

    Args:
        tensors: at least one tensor.

    Returns:
        The tensors in order, and their bytes, uint8 [total size], on the CPU.
    """
    # SGLang views each slice as its dtype, so it must be aligned to the element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    parts = [tensor.detach().cpu().flatten().view(torch.uint8) for tensor in ordered.values()]
    return ordered, torch.cat(parts)


def buckets(path: Path, most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Read a safetensors file part by part.

    Args:
        path: path of the file.
        most_bytes: maximum size of a part, unless a group of tensors is larger.
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
    """Yield names in alphabetical order, grouped where SGLang needs several tensors together.

    SGLang fuses the two down-projections of a latent attention layer, for queries and for keys and
    values, and drops one that arrives without the other.
    """
    remaining = set(names)
    for name in sorted(remaining):
        one, other = _QUERIES, _KEYS_AND_VALUES
        together = {name, name.replace(one, other), name.replace(other, one)} & remaining
        remaining -= together
        if together:
            yield sorted(together)
