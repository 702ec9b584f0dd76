"""Reads checkpoints with block-quantized float8 weights as dequantized values.

DeepSeek-V3 is published in this format, and other models have such copies (`...-FP8`): a matrix is
float8, and a second tensor, with the suffix `_scale_inv`, holds the scale of each block. A model
that computes in float8 has no gradients, so the values are converted to the dtype of the other
weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.model.weight_files import (
    UnreadableWeights,
    listed,
    quantized_files,
    weight_files,
)

_SCALE = "_scale_inv"

_READ = frozenset({"fp8", "mxfp4"})
"""Values of `quant_method` whose weights are read: float8 in blocks, and the experts of gpt-oss."""

Block = tuple[int, int]
"""Rows and columns of a matrix that share one scale."""


def block_size(config: Any) -> Block | None:  # noqa: ANN401 - transformers' configurations have no common type
    """Return the block size of a checkpoint's weights; None if they are not block-quantized float8.

    Args:
        config: the configuration of the Hugging Face model.

    Raises:
        UnsupportedModelError: the weights are in another float8 format.
    """
    quantization = getattr(config, "quantization_config", None) or {}
    if quantization.get("quant_method") != "fp8":
        return None
    block = quantization.get("weight_block_size")
    if not block:
        raise UnsupportedModelError(
            "quantization_config: only block-quantized fp8 is supported, but this model has"
            f" weight_block_size {block!r}; use a bfloat16 copy of the model"
        )
    rows, columns = block
    return rows, columns


def check_format(path: str, config: Any) -> None:  # noqa: ANN401 - as above
    """Check that this engine reads the format of a model's quantized weights, if they are.

    Inference servers may read others.

    Args:
        path: the folder, for the message.
        config: the configuration of the Hugging Face model.

    Raises:
        UnsupportedModelError: it does not.
    """
    quantization = getattr(config, "quantization_config", None) or {}
    method = quantization.get("quant_method")
    if quantization and method not in _READ:
        raise UnsupportedModelError(
            f"{path}: config.json has quantization_config with quant_method {method!r}, but of"
            " quantized weights only block float8 (fp8) and the MXFP4 of gpt-oss can be trained"
            " on; use a bfloat16 copy of the model"
        )


def dequantized(values: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Return the values of a quantized matrix, float32 [out, in].

    Args:
        values: float8 [out, in].
        scales: the scale of each block, [out / rows, in / columns], rounded up.
        block: rows and columns of a block; the last blocks may be partial.
    """
    rows, columns = block
    out, width = values.shape
    spread = scales.float().repeat_interleave(rows, 0)[:out]
    return values.float() * spread.repeat_interleave(columns, 1)[:, :width]


def unquantized(tensors: Mapping[str, Tensor], block: Block) -> tuple[dict[str, Tensor], list[str]]:
    """Return a checkpoint's tensors without scales, and a list of problems with the scales.

    Args:
        tensors: the tensors of all files, by name; values are not read.
        block: the block size of float8 weights.
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
            f"without one scale for each block of {block[0]} x {block[1]}": misshapen,
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
    """Return the weight files of a model.

    Args:
        path: of the folder.
        config: the configuration of the Hugging Face model.

    Raises:
        UnreadableWeights: there are no weight files, or some are missing.
        UnsupportedModelError: the weights are in an unsupported float8 format.
    """
    return quantized_files(path) if block_size(config) else weight_files(path)


class QuantizedFolder:
    """The safetensors files of a Hugging Face folder."""

    def __init__(self, path: str, block: Block, dtype: torch.dtype) -> None:
        """List the tensors.

        Args:
            path: of the folder.
            block: the block size of its float8 weights.
            dtype: the dtype of dequantized weights.

        Raises:
            UnsupportedModelError: the folder has no safetensors files.
        """
        self._block = block
        self._dtype = dtype
        self._files: dict[str, Path] = {}
        """The file of each tensor, by name."""
        try:
            files = quantized_files(path)
        except UnreadableWeights as error:
            raise UnsupportedModelError(f"{path}: {error}") from None
        for file in files:
            if file.suffix != ".safetensors":
                raise UnsupportedModelError(
                    f"{path}: float8 weights must be in safetensors files, not {file.name}"
                )
            try:
                with safe_open(file, framework="pt") as tensors:
                    self._files |= dict.fromkeys(tensors.keys(), file)
            except SafetensorError as error:
                raise UnsupportedModelError(
                    f"{file} can't be read ({error}); download it again"
                ) from error

    @property
    def names(self) -> list[str]:
        """All weights, without their scales."""
        return [name for name in self._files if not name.endswith(_SCALE)]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return weights by name, dequantizing float8.

        Raises:
            UnsupportedModelError: a weight is missing or has no scales.
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
            raise UnsupportedModelError(f"{name}: not found in the safetensors files of the model")
        with safe_open(self._files[name], framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor
