"""A file of tensors in the format of safetensors, made in memory once.

The library makes it twice, as a vector of its own and as the `bytes` that it hands over, and holds
the interpreter's lock for as long as it copies. Beside a whole model that is memory nobody has, and
nothing of the process answers meanwhile. What is written here is the same, byte for byte.

The format: https://huggingface.co/docs/safetensors/index#format
"""

import io
from collections.abc import Mapping, Sequence

import orjson
import torch
from torch import Tensor

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
_ALIGNMENT = 8
"""Of the first tensor, in bytes."""
_PART_BYTES = 16 << 20
"""Copied at a time, for some milliseconds: other threads go on in between."""


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a file that holds some tensors.

    In memory are the tensors, the file, and a copy of one tensor at a time if it is not contiguous
    or not on the CPU.

    Args:
        tensors: of any device and strides.

    Raises:
        TypeError: the dtype of one is not among those that checkpoints have.
    """
    order = list(_DTYPES)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            accepted = ", ".join(str(dtype) for dtype in order)
            raise TypeError(f"{name!r} is of {tensor.dtype}; files hold tensors of {accepted}")
    ordered = sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0]))
    file = io.BytesIO()
    file.write(_header(ordered))
    for _, tensor in ordered:
        # Bytes, since numpy knows no bfloat16.
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), _PART_BYTES):
            file.write(content[start : start + _PART_BYTES])
    # Not a copy: CPython hands over what was written.
    return file.getvalue()


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
    return len(text).to_bytes(8, "little") + text
