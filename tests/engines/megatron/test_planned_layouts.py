"""The trainer named by a plan accepts the planned layout."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.configuration_utils import PretrainedConfig

from tinkercloud_planning.architecture import UnknownArchitecture
from tinkercloud_planning.families import read
from tinkercloud_planning.gpus import Fleet, gpu, parse
from tinkercloud_planning.layouts import Layout, layouts
from tinkercloud_planning.search import Demand, divide
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.model import check
from tinkercloud_worker.model.architecture import UnsupportedModelError

CONFIGS: dict[str, dict[str, Any]] = {
    name: model["config"]
    for name, model in json.loads(
        (Path(__file__).parents[2] / "unit" / "planning" / "public_models.json").read_text()
    ).items()
}
FLEETS = ("1xL4", "1xH100", "8xA100-40", "8xH100", "8xB200", "32xH200", "128xH100")
LLAMA, MISTRAL, QWEN = "meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.3", "Qwen/Qwen3-0.6B"
MIXTRAL, QWEN_MOE = "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"
DEEPSEEK = "deepseek-ai/DeepSeek-V2-Lite"
KINDS = ["full_attention"] * 27 + ["sliding_attention"]


def refusals(config: dict[str, Any], layouts: Iterable[Layout]) -> list[str | None]:
    """Return what the megatron trainer says against training a model so, each way."""
    settings = dict(config)
    loaded = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return [_refusal(loaded, layout) for layout in layouts]


def _refusal(config: PretrainedConfig, layout: Layout) -> str | None:
    try:
        check(config, Parallelism(layout.tensor, layout.pipeline, layout.context, layout.expert))
    except UnsupportedModelError as error:
        return str(error)
    return None


def refusal(config: dict[str, Any]) -> str | None:
    """Return what the megatron trainer says against training a model at one rank."""
    [said] = refusals(config, [Layout()])
    return said


@pytest.mark.parametrize("name", CONFIGS)
def test_the_trainer_takes_every_plan_of_the_published_table(name: str) -> None:
    config = CONFIGS[name]
    model = read(config)
    demands = [Demand(model, min(2048, model.max_context_length), rank) for rank in (32, None)]

    divisions = [divide(demand, parse(fleet)) for demand in demands for fleet in FLEETS]

    planned = {division.trainer.layout for division in divisions if division}
    said = refusals(config, planned)
    if model.only_torch is None:
        assert set(said) <= {None}
    else:
        assert all(refused and "use backend torch" in refused for refused in said)


@pytest.mark.parametrize("per_node", [6, 16])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in CONFIGS if not read(CONFIGS[name]).only_torch),
        (LLAMA, {"vocab_size": 128_257}),
        (DEEPSEEK, {"kv_lora_rank": 513}),
        (DEEPSEEK, {"q_lora_rank": 1539}),
        (MIXTRAL, {"intermediate_size": 14_340}),
    ],
)
def test_the_trainer_takes_every_layout_that_is_considered(
    name: str, changes: dict[str, Any], per_node: int
) -> None:
    config, fleet = CONFIGS[name] | changes, Fleet(gpu("H100"), 2 * per_node, per_node)

    considered = list(layouts(read(config), fleet.count, per_node))

    assert set(refusals(config, considered)) == {None}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (MISTRAL, {"sliding_window": 4096}),
        (MISTRAL, {"sliding_window": 32768}),
        (MIXTRAL, {"sliding_window": 4096}),
        (QWEN, {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}),
        (QWEN, {"use_sliding_window": True, "max_window_layers": 28}),
        (QWEN, {"use_sliding_window": True, "max_window_layers": 0}),
        (QWEN, {"use_sliding_window": True, "layer_types": KINDS}),
        (QWEN, {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
        (QWEN, {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 0}),
        (QWEN_MOE, {"use_sliding_window": True}),
        (QWEN_MOE, {"use_sliding_window": True, "sliding_window": 40960}),
    ],
)
def test_a_window_makes_the_torch_trainer_the_planned_one_if_megatron_rejects_it(
    name: str, changes: dict[str, Any]
) -> None:
    config = CONFIGS[name] | changes

    refused = refusal(config)

    model = read(config)
    assert bool(model.only_torch) == bool(refused)
    if refused:
        assert "sliding_attention" in refused
        assert model.max_context_length == (changes.get("sliding_window") or 4096)


def test_mistrals_window_that_a_configuration_does_not_mention_is_known() -> None:
    config = {
        field: value for field, value in CONFIGS[MISTRAL].items() if field != "sliding_window"
    }

    assert "window 4096" in str(refusal(config))
    assert read(config).only_torch


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type",
        ),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type"),
        (
            LLAMA,
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor",
        ),
        (
            LLAMA,
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config",
        ),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK, {"n_shared_experts": 0}, "n_shared_experts"),
        (QWEN_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (MIXTRAL, {"num_experts_per_tok": 1}, "num_experts_per_tok|one expert"),
        ("Qwen/Qwen2.5-0.5B", {"model_type": "gemma2", "head_dim": 64}, "model_type|family"),
    ],
)
def test_unsupported_models_are_rejected_by_both_trainer_and_planner(
    name: str, changes: dict[str, Any], field: str
) -> None:
    config = CONFIGS[name] | changes

    with pytest.raises(UnknownArchitecture, match=field):
        read(config)
    assert refusal(config)
