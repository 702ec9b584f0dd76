"""Files of PEFT adapters: what is read, and what is rejected by name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_protocol.adapters import peft
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest

PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
    "bias": "none",
    "use_dora": False,
    "rank_pattern": {},
    "modules_to_save": None,
}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
Entry = dict[str, Any]


def a_file(*tensors: tuple[str, str, list[int]], item: int = 4) -> tuple[bytes, int]:
    """Return the start of a safetensors file up to its tensors, and the size of the whole."""
    entries, end = dict[str, Entry](), 0
    for name, dtype, shape in tensors:
        size = item
        for length in shape:
            size *= length
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return encoded(entries), len(encoded(entries)) + end


def encoded(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def both(module: str, rank: int = 4) -> list[tuple[str, str, list[int]]]:
    return [
        (f"{module}.lora_A.weight", "F32", [rank, 32]),
        (f"{module}.lora_B.weight", "F32", [16, rank]),
    ]


@given(st.integers(1, 1024), st.integers(1, 4096), st.booleans())
def test_the_factor_of_an_adapter_is_pefts(rank: int, alpha: int, is_stabilized: bool) -> None:
    config = peft.read_config(
        {**PLAIN, "r": rank, "lora_alpha": alpha, "use_rslora": is_stabilized}
    )

    assert config.rank == rank
    assert config.scale == pytest.approx(alpha / (rank**0.5 if is_stabilized else rank))


@pytest.mark.parametrize(
    "fields",
    [
        # As ms-swift writes them.
        {"lora_dtype": "bfloat16", "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-6},
        {"lora_dtype": None, "lorap_lr_ratio": None, "lorap_emb_lr": 1e-6},
        {"runtime_config": {"ephemeral_gpu_offload": False}},
    ],
)
def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert peft.read_config({**PLAIN, **fields}) == peft.read_config(PLAIN)


@pytest.mark.parametrize(
    "field",
    [
        {"peft_type": "IA3"},
        {"task_type": "SEQ_CLS"},
        {"bias": "lora_only"},
        {"bias": ["none"]},
        {"runtime_config": {"ephemeral_gpu_offload": True}},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"lora_bias": True},
        {"layer_replication": [[0, 1]]},
        {"target_parameters": ["experts.gate_up_proj"]},
        {"trainable_token_indices": [1]},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"a_field_of_a_newer_release": 3},
        {"r": 0},
        {"r": 2048},
        {"r": "4"},
        {"r": True},
        {"lora_alpha": 0},
        {"lora_alpha": -1},
        {"lora_alpha": None},
        {"lora_alpha": True},
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"lora_alpha": 10**400},
        {"lora_alpha": "16"},
        {"r": 4.0},
        {"r": None},
        {"use_rslora": "true"},
        {"use_rslora": "false"},
        {"use_rslora": 1},
        {"use_rslora": 0},
        {"use_rslora": [True]},
        {"fan_in_fan_out": "true"},
        {"init_lora_weights": 1},
        {"init_lora_weights": ["pissa"]},
        {"init_lora_weights": "pissa_niter_4"},
        {"target_modules": {"q_proj": 1}},
        {"target_modules": [1]},
        {"target_modules": [""]},
        {"exclude_modules": 3},
        {"layers_to_transform": "0"},
        {"layers_to_transform": True},
        {"layers_to_transform": -1},
        {"layers_to_transform": [0, "1"]},
        {"layers_pattern": 1},
        {"bias": None},
        {"bias": False},
        {"task_type": ["CAUSAL_LM"]},
        {"peft_type": ["LORA"]},
        {"use_dora": "false"},
        {"use_dora": 1},
        {"rank_pattern": "q_proj"},
    ],
)
def test_a_configuration_that_computes_something_else_is_rejected_by_name(
    field: dict[str, Any],
) -> None:
    (name,) = field

    with pytest.raises(InvalidRequest, match=rf"^adapter_config\.json: {name}: "):
        peft.read_config({**PLAIN, **field})


@given(st.dictionaries(st.sampled_from([*PLAIN, "use_rslora", "x"]), st.tuples(st.text())))
def test_any_other_configuration_is_rejected_and_not_an_error(content: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        peft.read_config(content)


@pytest.mark.parametrize(
    ("modules", "switches"),
    [
        ([Q], {"train_mlp": False, "train_unembed": False}),
        (["model.layers.1.mlp.up_proj"], {"train_attn": False, "train_unembed": False}),
        (["base_model.model.lm_head"], {"train_attn": False, "train_mlp": False}),
        ([Q, "model.layers.1.mlp.experts.7.down_proj"], {"train_unembed": False}),
    ],
)
def test_the_adapted_modules_decide_the_switches(
    modules: list[str], switches: dict[str, bool]
) -> None:
    start, size = a_file(*[half for module in modules for half in both(module)])

    assert peft.read_header(start, size, 4) == LoraConfig(rank=4, seed=0, **switches)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "contains no LoRA matrix"),
        (both(Q)[:1], "lora_A or lora_B, but not both"),
        (both(Q, rank=8), "does not match the rank 4"),
        ([*both(Q), *both(Q.removeprefix("base_model.model."))], "appears twice"),
        ([*both(Q), (f"{Q}.lora_magnitude_vector", "F32", [16])], "DoRA"),
        ([*both(Q), ("model.embed_tokens.lora_embedding_A", "F32", [4, 9])], "embeddings are not"),
        ([*both(Q), ("lm_head.base_layer.weight", "F32", [4, 9])], "has no adapter"),
        ([*both(Q), ("model.embed_tokens.weight", "F32", [4, 9])], "save_embedding_layers=False"),
        ([*both(Q), (f"{Q}.base_layer.bias", "F32", [9])], "biases"),
        ([(f"{Q}.lora_A.weight", "F64", [4, 32])], "dtype F64; accepted are F32, F16, BF16"),
        ([(f"{Q}.lora_A.weight", "F32", [4])], "does not match the rank"),
    ],
)
def test_a_file_with_other_tensors_is_rejected_by_name(
    tensors: list[tuple[str, str, list[int]]], message: str
) -> None:
    start, size = a_file(*tensors)

    with pytest.raises(InvalidRequest, match=message):
        peft.read_header(start, size, 4)


def test_a_file_of_another_size_is_rejected() -> None:
    start, size = a_file(*both(Q))

    with pytest.raises(InvalidRequest, match="incomplete or damaged"):
        peft.read_header(start, size - 1, 4)


@pytest.mark.parametrize("start", [b"\0" * 8, b"\xff" * 8, b"PK\x03\x04 zip", b"<!doctype html>"])
def test_a_file_of_another_format_is_rejected_by_its_first_bytes(start: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a safetensors file"):
        peft.header_bytes(start)


@given(st.one_of(st.binary(), st.from_type(object).map(repr).map(str.encode)))
def test_no_header_is_an_error_of_the_server(content: bytes) -> None:
    with pytest.raises(InvalidRequest):
        peft.read_header(b"\0" * 8 + content, 10**6, 4)
