"""Checkpoints whose weights are blocks of float8, read as the values that they stand for.

DeepSeek-V3 is published so, and other models have such a copy (`...-FP8`): a matrix is float8, and
beside it, under its name and `_scale_inv`, is what each block of it is multiplied by. A model that
computes in float8 has no gradients; here its values are of the type that everything else is.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.model.weight_files import (
    UnreadableWeights,
    listed,
    quantized_files,
    weight_files,
)

_SCALE = "_scale_inv"

Block = tuple[int, int]
"""Rows and columns of a matrix that have one scale."""


def block_size(config: Any) -> Block | None:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the blocks of a checkpoint's weights; None if they are not in blocks of float8.

    Args:
        config: of the Hugging Face model.

    Raises:
        UnsupportedModelError: they are float8 in another form.
    """
    quantization = getattr(config, "quantization_config", None) or {}
    if quantization.get("quant_method") != "fp8":
        return None
    block = quantization.get("weight_block_size")
    if not block:
        raise UnsupportedModelError(
            "quantization_config: fp8 weights are read in blocks, but this model has"
            f" weight_block_size {block!r}; use a copy of it in bfloat16"
        )
    rows, columns = block
    return rows, columns


def dequantized(values: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Return the values of a quantized matrix, float32 [out, in].

    Args:
        values: float8 [out, in].
        scales: of each block, [out / rows, in / columns], rounded up.
        block: its rows and columns; the last ones may be cut off.
    """
    rows, columns = block
    out, width = values.shape
    spread = scales.float().repeat_interleave(rows, 0)[:out]
    return values.float() * spread.repeat_interleave(columns, 1)[:, :width]


def unquantized(tensors: Mapping[str, Tensor], block: Block) -> tuple[dict[str, Tensor], list[str]]:
    """Return a checkpoint's tensors without scales, and what is wrong with those, in words.

    Args:
        tensors: of all files, by name; values are not read.
        block: of float8 weights.
    """
    weights = {name: each for name, each in tensors.items() if not name.endswith(_SCALE)}
    lost, misshapen = [], []
    for name, each in weights.items():
        if each.element_size() > 1:
            continue
        scales = tensors.get(f"{name}{_SCALE}")
        if scales is None:
            lost.append(f"{name}{_SCALE}")
        elif each.ndim != 2 or scales.shape != _scales_shape(each, block):
            misshapen.append(f"{name}{_SCALE} {list(scales.shape)} of {list(each.shape)}")
    orphans = [
        name
        for name in tensors
        if name.endswith(_SCALE)
        and (
            (weight := weights.get(name.removesuffix(_SCALE))) is None or weight.element_size() > 1
        )
    ]
    wrong = [
        f"{problem}: {listed(names)}"
        for problem, names in {
            "missing in the files": lost,
            f"not one scale for each block of {block[0]} x {block[1]}": misshapen,
            "scales of weights that are not float8": orphans,
        }.items()
        if names
    ]
    return {
        name: each if each.element_size() > 1 else each.to(torch.bfloat16)
        for name, each in weights.items()
    }, wrong


def _scales_shape(weight: Tensor, block: Block) -> tuple[int, ...]:
    return tuple(-(-size // of) for size, of in zip(weight.shape, block, strict=True))


def files_read(path: str, config: Any) -> Sequence[Path]:  # noqa: ANN401 - as above
    """Return the files that a model's weights are read from.

    Args:
        path: of the folder.
        config: of the Hugging Face model.

    Raises:
        UnreadableWeights: there are none, or some are missing.
        UnsupportedModelError: they are float8 in a form that is not read.
    """
    return quantized_files(path) if block_size(config) else weight_files(path)


class QuantizedFolder:
    """The safetensors files of a Hugging Face folder."""

    def __init__(self, path: str, block: Block, dtype: torch.dtype) -> None:
        """List the tensors.

        Args:
            path: of the folder.
            block: of its float8 weights.
            dtype: of dequantized weights.

        Raises:
            UnsupportedModelError: there are none.
        """
        self._block = block
        self._dtype = dtype
        self._files: dict[str, Path] = {}
        """By name of a tensor."""
        try:
            files = quantized_files(path)
        except UnreadableWeights as error:
            raise UnsupportedModelError(f"{path}: {error}") from None
        for file in files:
            if file.suffix != ".safetensors":
                raise UnsupportedModelError(
                    f"{path}: float8 weights are read from safetensors files, not {file.name}"
                )
            with safe_open(file, framework="pt") as tensors:
                self._files |= dict.fromkeys(tensors.keys(), file)

    @property
    def names(self) -> list[str]:
        """All weights, without their scales."""
        return [name for name in self._files if not name.endswith(_SCALE)]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return weights by name, those of float8 dequantized.

        Raises:
            UnsupportedModelError: a weight is not there, or has no scales.
        """
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        values = self._tensor(name)
        if values.element_size() > 1:
            return values
        scales = self._tensor(f"{name}{_SCALE}")
        return dequantized(values, scales, self._block).to(self._dtype)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._files:
            raise UnsupportedModelError(f"{name}: no safetensors file of the model has it")
        with safe_open(self._files[name], framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor
