"""Values, layers and shapes of imported adapters are checked without a library for tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from tinkercloud_api.transfers.base_weights import read_base
from tinkercloud_protocol.adapters import adapter_fit, peft
from tinkercloud_protocol.adapters.adapter_file import AdapterFile, is_finite
from tinkercloud_protocol.adapters.adapter_fit import BaseWeights
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.families import ONE_BY_ONE
from tinkercloud_testing.small_models.models import save as save_model
from tinkercloud_testing.small_models.models import tiny_llama, tiny_qwen3_moe
from tinkercloud_testing.training.peft_adapters import WEIGHTS, write_adapter

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
RANK = 2
CONFIG: dict[str, Any] = {"target_modules": ["q_proj"]}


@pytest.mark.parametrize("dtype", DTYPES)
@given(bits=st.lists(st.integers(0, 2**32 - 1), max_size=9))
def test_values_are_finite_as_torch_says(dtype: str, bits: list[int]) -> None:
    raw = np.array(bits, np.uint32) if dtype == "F32" else np.array(bits, np.uint32).astype("u2")
    content = raw.tobytes()
    values = torch.frombuffer(bytearray(content), dtype=DTYPES[dtype]) if bits else torch.ones(0)

    assert is_finite(content, dtype) == bool(torch.isfinite(values).all())


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_value_is_finite_and_the_next_is_not(dtype: str, value: float) -> None:
    largest = torch.finfo(DTYPES[dtype]).max
    given = torch.tensor([1.0, min(value, largest) if np.isfinite(value) else value, -2.0])
    content = given.to(DTYPES[dtype]).view(torch.uint8).numpy().tobytes()

    assert is_finite(content, dtype) == bool(np.isfinite(value))


def an_adapter(
    *modules: str, columns: int = 6, rows: int = 4, changes: Mapping[int, float] | None = None
) -> bytes:
    """Return a file with adapters of these modules, with other last values of some tensors."""
    tensors = {}
    for number, module in enumerate(modules):
        dtype = list(DTYPES.values())[number % 3]
        for half, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = torch.ones(shape).to(dtype)
    for place, value in (changes or {}).items():
        tensors[list(tensors)[place]].view(-1)[-1] = value
    return save(tensors)


def layer(number: int, name: str = "self_attn.q_proj") -> str:
    return f"model.layers.{number}.{name}"


def received(content: bytes, size: int) -> bytes:
    """Return the bytes of a file that may be stored if it arrives in parts of this size."""
    file = AdapterFile(len(content), RANK)
    return b"".join(file.add(content[at : at + size]) for at in range(0, len(content), size))


@pytest.mark.parametrize("size", [1, 3, 7, 8, 100, 10**6])
def test_a_file_in_parts_of_any_size_is_stored_as_it_is(size: int) -> None:
    content = an_adapter(layer(0), layer(1), layer(2))

    assert received(content, size) == content


@pytest.mark.parametrize("size", [1, 3, 7, 10**6])
@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_with_its_tensor(
    size: int, place: int, value: float
) -> None:
    content = an_adapter(layer(0), layer(1), layer(2), changes={place: value})

    with pytest.raises(InvalidRequest, match=r"'base_model.*' has values that are NaN or infinite"):
        received(content, size)


def check(content: bytes, config: Mapping[str, Any], base: BaseWeights) -> None:
    adapter_fit.check(content[: peft.header_bytes(content)], config, base)


BASE = BaseWeights(
    num_layers=3,
    shapes={
        **{layer(number): [4, 6] for number in range(4)},
        **{layer(number, "mlp.up_proj"): [4, 6] for number in (0, 2)},
        "lm_head": [90, 6],
    },
)
"""Three layers, of which the second has no MLP, and one for multi-token prediction."""
ALL = [layer(0), layer(1), layer(2)]


@pytest.mark.parametrize(
    ("modules", "config"),
    [
        (ALL, {}),
        ([layer(1)], {"layers_to_transform": 1}),
        ([layer(0), layer(2)], {"layers_to_transform": [0, 2]}),
        ([layer(0), layer(2)], {"layers_to_transform": [0, 2], "layers_pattern": "layers"}),
        ([layer(0), layer(2)], {"layers_to_transform": [0, 2], "layers_pattern": ["layers"]}),
        ([layer(0, "mlp.up_proj"), layer(2, "mlp.up_proj")], {"target_modules": ["up_proj"]}),
        ([layer(1)], {"target_modules": r"model\.layers\.1\..*"}),
        ([layer(1)], {"target_modules": ["q_proj"], "exclude_modules": r".*\.[02]\..*"}),
        ([layer(1)], {"target_modules": [layer(1)]}),
        ([layer(1, "unknown.proj")], {"target_modules": ["proj"]}),
        ([layer(1, "mlp.experts.3.up_proj")], {"target_modules": ["up_proj"]}),
        (["lm_head"], {"target_modules": ["lm_head"]}),
    ],
)
def test_adapters_of_what_their_configuration_selects_are_accepted(
    modules: list[str], config: dict[str, Any]
) -> None:
    rows = 90 if modules == ["lm_head"] else 4
    content = an_adapter(*modules, rows=rows)

    check(content, {**CONFIG, **config}, BASE)
    check(content, {**CONFIG, **config}, BaseWeights())


@pytest.mark.parametrize(
    ("modules", "config", "message"),
    [
        ([*ALL, layer(1_000_000_000)], {}, "in layer 1000000000, but the base model has 3 layers"),
        ([*ALL, layer(3)], {}, "in layer 3, but"),
        (ALL[:2], {}, r"'model.layers.2.self_attn.q_proj' has no adapter"),
        (ALL[1:], {}, r"'model.layers.0.self_attn.q_proj' has no adapter"),
        ([layer(0)], {"layers_to_transform": [0, 2]}, r"'model.layers.2.* has no adapter"),
        (ALL, {"layers_to_transform": [0, 1]}, r"'model.layers.2.* do not select it"),
        (ALL, {"target_modules": ["k_proj"]}, "do not select it"),
        (ALL, {"target_modules": []}, "do not select it"),
        (ALL, {"exclude_modules": ["q_proj"]}, "do not select it"),
        (["lm_head"], {"target_modules": ["lm_head"]}, r"of shape \[4, 6\].* has \[90, 6\]"),
        (
            [layer(0, "mlp.up_proj")],
            {"target_modules": ["up_proj"]},
            r"'model.layers.2.mlp.up_proj' has no adapter",
        ),
    ],
)
def test_adapters_of_another_model_or_configuration_are_refused_by_name(
    modules: list[str], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check(an_adapter(*modules), {**CONFIG, **config}, BASE)


@pytest.mark.parametrize("columns", [5, 7, 600])
def test_adapters_of_another_width_are_refused_with_both_shapes(columns: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"of shape \[4, {columns}\], but that .* \[4, 6\]"):
        check(an_adapter(*ALL, columns=columns), CONFIG, BASE)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3_moe])
def test_adapters_that_peft_writes_fit_the_model_that_they_are_of(
    make: Any, tmp_path: Path
) -> None:
    base = read_base(save_model(make(), tmp_path / "base"))
    cases: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "o_proj"]},
        {"target_modules": "all-linear" if make is tiny_llama else ["k_proj", "o_proj"]},
        {"target_modules": ["k_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]},
        {"target_modules": ["lm_head", "q_proj"]},
    ]

    for number, fields in enumerate(cases):
        folder = write_adapter(make(), tmp_path / str(number), **fields)
        config = json.loads((folder / "adapter_config.json").read_text())
        peft.read_config(config)

        check((folder / WEIGHTS).read_bytes(), config, base)

    assert base.num_layers == 2
    assert layer(1) in base.shapes


@pytest.mark.parametrize("family", ["shared keys, Gemma 3n", "shared keys, Gemma 4"])
def test_layers_that_share_keys_and_values_need_no_adapters_of_the_projections_in_their_files(
    family: str, tmp_path: Path
) -> None:
    folder = save_model(ONE_BY_ONE[family](), tmp_path / "base")
    ignored = {
        layer(number, f"self_attn.{name}.weight"): torch.ones(16, 32)
        for number in (2, 3)
        for name in ("k_proj", "v_proj")
    }
    save_file(ignored, folder / "shared.safetensors")
    base = read_base(folder)
    adapter = write_adapter(
        ONE_BY_ONE[family](), tmp_path / "adapter", target_modules=["q_proj", "k_proj", "v_proj"]
    )
    config = json.loads((adapter / "adapter_config.json").read_text())

    check((adapter / WEIGHTS).read_bytes(), config, base)
    assert base.num_kv_shared_layers == 2
    assert ignored.keys() <= {f"{name}.weight" for name in base.shapes}
    missing = an_adapter(layer(0), columns=32, rows=32)
    with pytest.raises(InvalidRequest, match=r"layers.1.self_attn.q_proj' has no adapter"):
        check(missing, config, base)
