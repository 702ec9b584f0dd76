"""The weight files of a model's folder: which are read, and what their headers say.

They are found as transformers finds them. Only headers are read here, so this is cheap for a model
of any size.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_LENGTH_BYTES = 8
"""Of the number before a safetensors header that says how long it is."""
_LONGEST_HEADER = 100_000_000
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class UnreadableWeights(Exception):
    """A folder's weight files are missing or damaged; the message names file and reason."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte of the file at which its values begin."""
    size: int
    """Bytes of its values."""

    def read(self, start: int, size: int) -> bytes:
        """Return some bytes of its values.

        Args:
            start: the first one, counted from the tensor's own first.
            size: how many.
        """
        with self.file.open("rb") as file:
            file.seek(self.start + start)
            return file.read(size)


def has_weights(path: str) -> bool:
    """Whether a folder has weight files; one that only describes a model has none."""
    folder = Path(path)
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def weight_files(path: str) -> Sequence[Path]:
    """Return the files that a model's weights are read from.

    Args:
        path: of the folder.

    Raises:
        UnreadableWeights: there are none, some are missing, or there are two sets of weights.
    """
    folder = Path(path)
    single, index = folder / _SINGLE, folder / _INDEX
    if index.is_file():
        files = _indexed(index)
        if single.is_file() and single not in files:
            raise UnreadableWeights(
                f"{_SINGLE} is next to {_INDEX}, which names other files: trainers and inference"
                " engines would read different weights; remove those that are not meant"
            )
        return files
    if single.is_file():
        return [single]
    if (folder / _PICKLED).is_file():
        return [folder / _PICKLED]
    if (folder / _PICKLED_INDEX).is_file():
        return _indexed(folder / _PICKLED_INDEX)
    raise UnreadableWeights(
        f"there is neither {_SINGLE} nor {_INDEX}; weights are read from files that have these"
        " names, as save_pretrained of transformers writes them"
    )


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableWeights(f"{index.name} is damaged ({error}); fetch it again") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnreadableWeights(f"{index.name} names no weights; fetch it again")
    return weight_map


def _indexed(index: Path) -> list[Path]:
    names = sorted(set(_weight_map(index).values()))
    files = [index.with_name(Path(name).name) for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UnreadableWeights(
            f"{index.name} names files that are not there: {listed(missing)}; fetch them, or remove"
            " them from the index if the model has no such weights"
        )
    return files


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors files by name.

    Args:
        files: of `weight_files`.

    Raises:
        UnreadableWeights: a file is damaged, two files have a tensor of the same name, or a tensor
            is not in the file where the index says that it is.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _tensors_of(file):
            if name in tensors:
                raise UnreadableWeights(
                    f"{name} is in two files, {tensors[name].file.name} and {file.name}; remove one"
                )
            tensors[name] = tensor
    index = files[0].with_name(_INDEX)
    if index.is_file():
        promised = _weight_map(index)
        lost = [name for name in sorted(promised) if name not in tensors]
        if lost:
            raise UnreadableWeights(
                f"{_INDEX} names tensors that none of its files has: {listed(lost)}; fetch index"
                " and files again, from one revision of the model"
            )
        moved = [name for name, file in promised.items() if tensors[name].file.name != file]
        if moved:
            raise UnreadableWeights(
                f"{_INDEX} names another file than the one that has the tensor: {listed(moved)};"
                " fetch index and files again, from one revision of the model"
            )
    return tensors


def _tensors_of(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
            raise UnreadableWeights(f"{file.name} is no safetensors file; fetch it again")
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
        except ValueError:
            raise UnreadableWeights(f"{file.name} is damaged; fetch it again") from None
    data = _LENGTH_BYTES + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor = _stored(file, name, entry, data)
        if tensor.start + tensor.size > size:
            raise UnreadableWeights(
                f"{file.name} is cut short: it has {size} bytes, but {name} ends at"
                f" {tensor.start + tensor.size}; fetch it again"
            )
        yield name, tensor


def _stored(file: Path, name: str, entry: Mapping[str, Any], data: int) -> StoredTensor:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
        start, stop = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise UnreadableWeights(
            f"{file.name}: {name} is of dtype {entry.get('dtype')!r}, or damaged; weights are read"
            f" in {', '.join(_DTYPES)}"
        ) from None
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise UnreadableWeights(
            f"{file.name}: {name} {list(shape)} has {stop - start} bytes of values, which is not"
            " its size; fetch the file again"
        )
    return StoredTensor(file, dtype, shape, data + start, stop - start)


def quantized_files(path: str) -> Sequence[Path]:
    """Return the files that quantized weights are read from; without an index, all there are.

    Args:
        path: of the folder.

    Raises:
        UnreadableWeights: there are none, or some are missing.
    """
    folder = Path(path)
    found = sorted(folder.glob("*.safetensors"))
    return found if found and not (folder / _INDEX).is_file() else weight_files(path)


def described_tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return all tensors of a model's files by name, with shapes and dtypes but without values.

    Args:
        files: of `weight_files` or `quantized_files`.

    Raises:
        UnreadableWeights: as `stored_tensors` does.
    """
    if files[0].suffix == ".safetensors":
        stored = stored_tensors(files)
        return {
            name: torch.empty(each.shape, dtype=each.dtype, device="meta")
            for name, each in stored.items()
        }
    return {
        name: tensor
        for file in files
        for name, tensor in torch.load(file, map_location="meta", weights_only=True).items()
    }


_LISTED = 5


def listed(names: Sequence[str]) -> str:
    """Return names for a message: the first few, and how many more there are."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
