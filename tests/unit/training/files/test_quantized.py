"""Block-quantized float8 checkpoints are trained with their dequantized values."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.small_models.models import (
    save,
    tiny_deepseek_v3,
    tiny_llama,
    tiny_qwen3_moe,
)
from tinkercloud_testing.small_models.quantizing import quantize
from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.loading import load_pretrained
from tinkercloud_worker.model.quantized import dequantized

BLOCK = (24, 32)
"""Divides none of the matrices."""


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_each_value_is_multiplied_by_the_scale_of_its_block(
    shape: tuple[int, int], block: tuple[int, int]
) -> None:
    values = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1]))

    meant = dequantized(values, scales, block)

    for row in range(shape[0]):
        for column in range(shape[1]):
            scale = scales[row // block[0], column // block[1]]
            assert meant[row, column] == values[row, column].float() * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3_moe, tiny_deepseek_v3])
def test_a_base_model_has_the_values_that_its_blocks_stand_for(
    tmp_path: Path, make: Callable[[], PreTrainedModel], dtype: torch.dtype
) -> None:
    plain, folder = save(make(), tmp_path / "plain"), save(make(), tmp_path / "blocks")
    meant = quantize(folder, BLOCK)
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in load_weights(folder).values())
    save_file(meant, plain / "model.safetensors", {"format": "pt"})

    weights = TorchBaseModel.load(str(folder), dtype).named_weights()

    expected = TorchBaseModel.load(str(plain), dtype).named_weights()
    assert weights.keys() == expected.keys()
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_scales_may_be_in_another_file_than_their_weights(tmp_path: Path) -> None:
    folder = save(tiny_llama(), tmp_path)
    whole = quantize(folder, BLOCK)["model.layers.0.mlp.up_proj.weight"]
    weights = load_weights(folder)
    scales = {name: weights.pop(name) for name in list(weights) if name.endswith("_scale_inv")}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    save_file(scales, folder / "scales.safetensors", {"format": "pt"})

    model = load_pretrained(str(folder), torch.float32)

    assert torch.equal(model.get_parameter("model.layers.0.mlp.up_proj.weight"), whole)


def test_unsupported_quantization_is_rejected_by_name(tmp_path: Path) -> None:
    folder = save(tiny_llama(), tmp_path)
    quantize(folder, BLOCK)
    weights = load_weights(folder)
    lost = "model.layers.0.mlp.up_proj.weight_scale_inv"
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=lost):
        load_pretrained(str(folder), torch.float32)

    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = None
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="weight_block_size None; use a bfloat16 copy"):
        load_pretrained(str(folder), torch.float32)


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
