"""Files of tensors in the format of safetensors, in memory once.

The library makes a file twice, as a vector of its own and as the `bytes` that it hands over, and
copies what it reads. Beside a whole model that is memory nobody has. For as long it holds the
interpreter's lock, most of a second for each GiB, and nothing of the process answers. What is
written here is the same, byte for byte.

The format: https://huggingface.co/docs/safetensors/index#format
"""

import io
from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, BinaryIO

import numpy as np
import orjson
import torch
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tinkercloud_protocol.wire import describe

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
"""The format's names, in the library's order of tensors: those of large elements come first, so
that all lie where their elements may."""
_LENGTH_BYTES = 8
"""Of the header, which they come before."""
_ALIGNMENT = 8
"""Of the first tensor, in bytes."""
_PART_BYTES = 16 << 20
"""Copied at a time, for some milliseconds: other threads go on in between."""
_METADATA = "__metadata__"
"""Of the header, beside tensors: texts that some writers leave for people."""

Count = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    """Of the header: a tensor, and from where to where it lies behind that, in bytes."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


_HEADER = TypeAdapter(dict[str, _Entry])
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a file that holds some tensors; see `write`."""
    file = io.BytesIO()
    write(tensors, file)
    # Not a copy: CPython hands over what was written.
    return file.getvalue()


def write(tensors: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Write a file that holds some tensors.

    In memory are the tensors, and a copy of one tensor at a time if it is not contiguous or not on
    the CPU.

    Args:
        tensors: of any device and strides.
        file: that is empty.

    Raises:
        TypeError: the dtype of one is not among those that checkpoints have.
    """
    order = list(_DTYPES)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            accepted = ", ".join(str(dtype) for dtype in order)
            raise TypeError(f"{name!r} is of {tensor.dtype}; files hold tensors of {accepted}")
    ordered = sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0]))
    file.write(_header(ordered))
    for _, tensor in ordered:
        # Bytes, since numpy knows no bfloat16.
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), _PART_BYTES):
            file.write(content[start : start + _PART_BYTES])


def decode(content: bytes | memoryview) -> dict[str, Tensor]:
    """Return the tensors of a file, which are read where that lies: nobody may write to them.

    One that does not lie at a multiple of 8 bytes is copied.

    Raises:
        ValueError: it is not such a file; the message says in what.
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
        raise ValueError(f"its header is not one of tensors: {describe(error)}") from None
    # Other ways warn of memory that is read-only.
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
        raise ValueError(f"{name!r} is of {entry.dtype}, not one of {', '.join(_BY_NAME)}")
    if len(content) != prod(entry.shape) * dtype.itemsize:
        raise ValueError(f"{name!r} has {len(content)} bytes, too few or many for {entry.shape}")
    if content.storage_offset() % dtype.itemsize:
        raise ValueError(f"{name!r} begins in the midst of an element")
    try:
        return content.view(dtype).view(entry.shape)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"{name!r} has the shape {entry.shape}, larger than any tensor's"
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
