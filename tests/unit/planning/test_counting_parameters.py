"""Parameters that follow from a configuration are those that a model has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker_cookbook.hyperparam_utils import get_lora_param_count
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tinkercloud_planning.architecture import UnknownArchitecture
from tinkercloud_planning.families import model_types, read
from tinkercloud_testing.training.planned_adapters import adapter_parameters
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.lora.targets import find_targets

PUBLIC_MODELS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "public_models.json").read_text()
)
UNITS = {"M": 1e6, "B": 1e9}

every_model = pytest.mark.parametrize("name", PUBLIC_MODELS)


def config(name: str, **changes: object) -> dict[str, Any]:
    return {**PUBLIC_MODELS[name]["config"], **changes}


@every_model
def test_the_count_is_the_published_one(name: str) -> None:
    published = PUBLIC_MODELS[name]["parameters"]

    counted = read(config(name)).parameters

    assert counted == pytest.approx(float(published[:-1]) * UNITS[published[-1]], rel=0.02)


@every_model
def test_the_count_is_that_of_the_model_that_transformers_builds(name: str) -> None:
    settings = config(name)
    kind = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))

    assert read(config(name)).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "cookbooks"),
    {
        "Qwen/Qwen3-8B": "Qwen/Qwen3-8B",
        "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
        "Qwen/Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B-Instruct-2507",
        "meta-llama/Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
        "deepseek-ai/DeepSeek-V3": "deepseek-ai/DeepSeek-V3.1",
    }.items(),
)
def test_adapters_have_as_many_numbers_as_tinkers(name: str, cookbooks: str) -> None:
    settings, rank = config(name), 32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(settings.pop("model_type"), **settings)
        )

    expected = get_lora_param_count(cookbooks, rank)

    assert adapters.layout(find_targets(model, "model", "lm_head"), rank).size == expected
    assert adapter_parameters(read(config(name)), rank) == expected


@every_model
def test_what_transformers_writes_of_a_model_is_read_alike(name: str) -> None:
    settings = config(name)

    written = AutoConfig.for_model(settings.pop("model_type"), **settings).to_dict()

    assert read(written) == read(config(name))


def test_the_public_models_cover_every_model_type_and_0_5_to_671_billion_parameters() -> None:
    counts = sorted(read(config(name)).parameters for name in PUBLIC_MODELS)

    assert {config(name)["model_type"] for name in PUBLIC_MODELS} == set(model_types())
    assert len(counts) >= 20
    assert counts[0] < 0.5e9
    assert counts[-1] > 670e9


def test_an_unknown_model_type_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnknownArchitecture, match=r"model_type: 'mamba'.*llama.*qwen3_moe"):
        read({"model_type": "mamba"})


@pytest.mark.parametrize("value", [None, 0, -1, "4096", 2.5, True])
def test_a_size_that_can_not_be_is_refused_by_name(value: object) -> None:
    with pytest.raises(UnknownArchitecture, match="intermediate_size"):
        read(config("Qwen/Qwen3-8B", intermediate_size=value))


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("Qwen/Qwen3-8B", {"num_key_value_heads": 5}, "num_key_value_heads"),
        ("Qwen/Qwen3-30B-A3B", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("Qwen/Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        ("deepseek-ai/DeepSeek-V3", {"first_k_dense_replace": 61}, "first_k_dense_replace"),
        ("deepseek-ai/DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("meta-llama/Llama-3.1-8B", {"mlp_bias": True}, "mlp_bias"),
        ("meta-llama/Llama-3.1-8B", {"rope_scaling": "yarn"}, "rope_scaling.*expected an object"),
        ("meta-llama/Llama-3.1-8B", {"quantization_config": "fp8"}, "quantization_config"),
        ("mistralai/Mistral-7B-v0.1", {"sliding_window": "4096"}, "sliding_window"),
    ],
)
def test_a_model_that_would_be_counted_wrong_is_refused(
    name: str, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(UnknownArchitecture, match=field):
        read(config(name, **changes))
