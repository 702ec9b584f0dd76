"""Finds the weight files of a model folder and reads their headers.

Files are selected as in transformers. Only headers are read, which is fast for a model of any size.
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
"""Bytes of the length field before a safetensors header."""
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
    """Weight files are missing or damaged; the message names the file and the reason."""


class OtherFormat(UnreadableWeights):
    """The weights are in a format that can be converted; the message says how."""


def share_weights(folder: Path) -> None:
    """Give the weight files of a new model folder the mode of its config.json.

    safetensors ignores the umask and writes files with mode 0600.
    """
    mode = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of its values in the file, in bytes."""
    size: int
    """Size of its values in bytes."""

    def read(self, start: int, size: int) -> bytes:
        """Return a range of its values as bytes.

        Args:
            start: offset from the start of the tensor.
            size: number of bytes.
        """
        with self.file.open("rb") as file:
            file.seek(self.start + start)
            return file.read(size)


def has_weights(path: str) -> bool:
    """Return whether a folder has weight files; some folders only hold a configuration."""
    folder = Path(path)
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def weight_files(path: str) -> Sequence[Path]:
    """Return the weight files of a model.

    Args:
        path: the folder.

    Raises:
        OtherFormat: there is only a GGUF file.
        UnreadableWeights: there are no weight files, some are missing, or there are two sets of
            them.
    """
    folder = Path(path)
    single, index = folder / _SINGLE, folder / _INDEX
    if index.is_file():
        files = _indexed(index)
        if single.is_file() and single not in files:
            raise UnreadableWeights(
                f"{_SINGLE} exists in addition to {_INDEX}, which lists other files: trainers and"
                " inference engines would read different weights; remove one set of files"
            )
        return files
    if single.is_file():
        return [single]
    if (folder / _PICKLED).is_file():
        return [folder / _PICKLED]
    if (folder / _PICKLED_INDEX).is_file():
        return _indexed(folder / _PICKLED_INDEX)
    if packed := sorted(folder.glob("*.gguf")):
        raise OtherFormat(
            "the weights are in a GGUF file only; convert it to another folder with python -m"
            f" tinkercloud_worker.convert_gguf {packed[0]} FOLDER, and serve that one"
        )
    raise UnreadableWeights(
        f"neither {_SINGLE} nor {_INDEX} exists; weight files must have the names that"
        " save_pretrained of transformers writes"
    )


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableWeights(f"{index.name} is damaged ({error}); download it again") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnreadableWeights(f"{index.name} lists no weights; download it again")
    return weight_map


def _indexed(index: Path) -> list[Path]:
    names = sorted(set(_weight_map(index).values()))
    files = [index.with_name(Path(name).name) for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UnreadableWeights(
            f"{index.name} lists missing files: {listed(missing)}; download them, or remove them"
            " from the index if the model has no such weights"
        )
    return files


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors files by name.

    Args:
        files: the result of `weight_files`.

    Raises:
        UnreadableWeights: a file is damaged, two files contain the same tensor, or a tensor is not
            in the file named by the index.
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
                f"{_INDEX} lists tensors that are in none of its files: {listed(lost)}; download"
                " the index and the files again, from one revision of the model"
            )
        moved = [name for name, file in promised.items() if tensors[name].file.name != file]
        if moved:
            raise UnreadableWeights(
                f"{_INDEX} names the wrong file for: {listed(moved)}; download the index and the"
                " files again, from one revision of the model"
            )
    return tensors


def _tensors_of(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
            raise UnreadableWeights(f"{file.name} is not a safetensors file; download it again")
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
        except ValueError:
            raise UnreadableWeights(f"{file.name} is damaged; download it again") from None
    data = _LENGTH_BYTES + length
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor = _stored(file, name, entry, data)
        if tensor.start + tensor.size > size:
            raise UnreadableWeights(
                f"{file.name} is truncated: it has {size} bytes, but {name} ends at"
                f" {tensor.start + tensor.size}; download it again"
            )
        yield name, tensor


def _stored(file: Path, name: str, entry: Mapping[str, Any], data: int) -> StoredTensor:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
        start, stop = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise UnreadableWeights(
            f"{file.name}: {name} has dtype {entry.get('dtype')!r} or is damaged; supported dtypes"
            f" are {', '.join(_DTYPES)}"
        ) from None
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise UnreadableWeights(
            f"{file.name}: {name} {list(shape)} has {stop - start} bytes of values, which does not"
            " match its shape and dtype; download the file again"
        )
    return StoredTensor(file, dtype, shape, data + start, stop - start)


def quantized_files(path: str) -> Sequence[Path]:
    """Return the files of quantized weights; all safetensors files if there is no index.

    Args:
        path: the folder.

    Raises:
        UnreadableWeights: there are no weight files, or some are missing.
    """
    folder = Path(path)
    found = sorted(folder.glob("*.safetensors"))
    return found if found and not (folder / _INDEX).is_file() else weight_files(path)


def described_tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return all tensors of a model's files by name, as meta tensors without values.

    Args:
        files: the result of `weight_files` or `quantized_files`.

    Raises:
        UnreadableWeights: as in `stored_tensors`.
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
    """Return names for a message: the first few, and the number of the rest."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
