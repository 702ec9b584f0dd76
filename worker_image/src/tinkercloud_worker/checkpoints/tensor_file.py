"""Reads and writes safetensors files with only one copy in memory.

The safetensors library builds a file twice, in its own buffer and as `bytes`, and copies what it
reads; a full model leaves no memory for that. Meanwhile it holds the GIL, most of a second per GiB,
and the process does not respond. The files written here are identical, byte for byte.

The format: https://huggingface.co/docs/safetensors/index#format
"""

import io
from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Protocol

import numpy as np
import orjson
import torch
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tinkercloud_protocol.wire.json_model import describe

_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in the format. The order is the library's order of tensors: large elements come
first, so that all are aligned."""
_LENGTH_BYTES = 8
"""Size of the field with the header's length, at the start of the file."""
_ALIGNMENT = 8
"""Alignment of the first tensor, in bytes."""
_PART_BYTES = 16 << 20
"""Bytes copied at a time, within some milliseconds, so that other threads can run in between."""
_METADATA = "__metadata__"
"""Key in the header for free text, in addition to tensors."""

Count = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    """A tensor in the header, with its byte range after the header."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


_HEADER = TypeAdapter(dict[str, _Entry])
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


class Growing(Protocol):
    """A file that is written from its start to its end."""

    def write(self, content: bytes | memoryview, /) -> object:
        """Append bytes."""


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a file with these tensors; see `write`."""
    file = io.BytesIO()
    write(tensors, file)
    # Not a copy: CPython returns the internal buffer.
    return file.getvalue()


def write(tensors: Mapping[str, Tensor], file: Growing) -> None:
    """Write a file with these tensors.

    Some MiB at a time are copied; a whole tensor only if it is not contiguous.

    Args:
        tensors: tensors with any device and strides.
        file: an empty file.

    Raises:
        TypeError: a tensor has an unsupported dtype.
    """
    order = list(_DTYPES)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            accepted = ", ".join(str(dtype) for dtype in order)
            raise TypeError(f"{name!r}: unsupported dtype {tensor.dtype}; use one of {accepted}")
    ordered = sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0]))
    file.write(_header(ordered))
    for _, tensor in ordered:
        # As bytes, since numpy does not support bfloat16.
        content = tensor.detach()
        if not content.is_contiguous():
            # On the CPU: GPUs may have no room.
            content = content.cpu().contiguous()
        for part in torch.split(content.view(-1).view(torch.uint8), _PART_BYTES):
            # A copy, since memory that NumPy has seen can't be given back to the system.
            file.write(part.to("cpu", copy=True).numpy().data)


def decode(content: bytes | memoryview) -> dict[str, Tensor]:
    """Return the tensors of a file. They share its memory and must not be written to.

    Content that is not aligned to 8 bytes is copied.

    Raises:
        ValueError: the file is invalid; the message says why.
    """
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    if not _LENGTH_BYTES < start <= len(content):
        raise ValueError(f"its header would end at byte {start} of {len(content)}")
    header = orjson.loads(content[_LENGTH_BYTES:start])
    if isinstance(header, dict):
        header.pop(_METADATA, None)
    try:
        entries = _HEADER.validate_python(header)
    except ValidationError as error:
        raise ValueError(f"its header is invalid: {describe(error)}") from None
    # Other conversions warn about read-only memory.
    data = from_dlpack(np.frombuffer(content, np.uint8, offset=start))
    if data.data_ptr() % _ALIGNMENT:
        data = data.clone()
    tensors, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.data_offsets[0] != end:
            raise ValueError(f"{name!r} begins at byte {entry.data_offsets[0]}, not at {end}")
        end = entry.data_offsets[1]
        tensors[name] = _read(name, entry, data[slice(*entry.data_offsets)])
    if end != len(data):
        raise ValueError(f"its tensors end at byte {end} of {len(data)}")
    return tensors


def _read(name: str, entry: _Entry, content: Tensor) -> Tensor:
    dtype = _BY_NAME.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"{name!r} has dtype {entry.dtype}; supported are {', '.join(_BY_NAME)}")
    if len(content) != prod(entry.shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has {len(content)} bytes, which do not match {entry.shape}")
    if content.storage_offset() % dtype.itemsize:
        raise ValueError(f"{name!r} is not aligned to its element size")
    try:
        return content.view(dtype).view(entry.shape)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"{name!r} has shape {entry.shape}, which exceeds the limits of a tensor"
        ) from None


def _header(ordered: Sequence[tuple[str, Tensor]]) -> bytes:
    entries, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
