"""Vision towers of plans, against those that transformers builds and computes on this machine.

Nothing here measures a GPU.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForImageTextToText

from tinkercloud_planning.activations import SEPARATE
from tinkercloud_planning.architecture import Tower, UnknownArchitecture
from tinkercloud_planning.families import read
from tinkercloud_planning.gpus import gpu, parse
from tinkercloud_planning.layouts import Layout
from tinkercloud_planning.memory import sampling, training
from tinkercloud_planning.plan import plan
from tinkercloud_testing.small_models.vision_models import tiny_qwen_vl

QWEN2_5, QWEN3 = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct"
QWEN3_MOE, GEMMA3 = "Qwen/Qwen3-VL-30B-A3B-Instruct", "google/gemma-3-4b-it"
CONFIGS: dict[str, dict[str, Any]] = {
    name: model["config"]
    for name, model in json.loads(
        (Path(__file__).parent / "public_models.json").read_text()
    ).items()
    if "vision_config" in model["config"]
}
TEXT = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
ROWS = 56
"""Patches of an image, each way."""
PIXELS = 1 << 24
"""Pixels of the image that plans count."""


def small(name: str) -> dict[str, Any]:
    """Return a configuration with the tower's width of a public model, and few layers."""
    config = deepcopy(CONFIGS[name])
    text, seen = config.get("text_config", config), config["vision_config"]
    text |= TEXT
    if name == GEMMA3:
        seen |= {"num_hidden_layers": 2}
        return config
    seen |= {"depth": 2, "out_hidden_size": TEXT["hidden_size"]}
    if name == QWEN2_5:
        seen |= {"fullatt_block_indexes": [1]}
    else:
        seen |= {"deepstack_visual_indexes": [0]}
    return config


def built(config: dict[str, Any]) -> Any:
    settings = deepcopy(config)
    loaded = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return AutoModelForImageTextToText.from_config(loaded, dtype=torch.bfloat16).eval()


def tower_of(config: dict[str, Any]) -> Tower:
    tower = read(config).tower
    assert tower is not None
    return tower


def peak_bytes(compute: Callable[[], object]) -> int:
    """Return the most bytes that exist at once, except inside convolutions.

    Those of CPUs have buffers that are larger than anything else.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        compute()
    results = recorded.profiler
    assert results is not None
    assert results.kineto_results is not None
    held = most = inside = 0
    for event in sorted(results.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = most if event.start_ns() < inside else max(most, held)
        elif event.name() == "aten::convolution":
            inside = event.start_ns() + event.duration_ns()
    return most


@pytest.mark.parametrize("name", CONFIGS)
def test_a_small_tower_has_as_many_parameters_as_the_one_that_transformers_builds(
    name: str,
) -> None:
    config = small(name)
    model = built(config)

    text = model.get_decoder()
    tower = sum(p.numel() for p in model.model.parameters())
    tower -= sum(p.numel() for p in text.parameters())

    assert tower_of(config).parameters == tower


def test_a_configuration_that_transformers_has_written_is_read_with_its_tower() -> None:
    model = tiny_qwen_vl()

    read_from_it = read(model.config.to_dict())

    assert read_from_it.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [QWEN2_5, QWEN3, GEMMA3])
def test_an_image_takes_no_more_than_is_estimated_and_at_least_two_thirds(name: str) -> None:
    config = small(name)
    model, seen = built(config), config["vision_config"]
    side = seen["patch_size"]
    estimate = float(tower_of(config).image_bytes)
    if name == GEMMA3:
        image = {"pixel_values": torch.rand(1, 3, seen["image_size"], seen["image_size"])}
    else:
        pixels = torch.rand(ROWS**2, 3 * seen["temporal_patch_size"] * side**2)
        image = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, ROWS, ROWS]])}
        estimate *= (ROWS * side) ** 2 / PIXELS

    def compute() -> None:
        pixels = image["pixel_values"].to(torch.bfloat16)
        with torch.no_grad():
            model.model.get_image_features(return_dict=True, **image | {"pixel_values": pixels})

    measured = peak_bytes(compute)

    assert 2 / 3 * estimate < measured < 1.01 * estimate


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gpu_of_trainer_or_engine_holds_the_whole_tower_and_its_largest_image(name: str) -> None:
    model, kind = read(CONFIGS[name]), gpu("H100")
    tower, text = tower_of(CONFIGS[name]), replace(model, tower=None)

    trained, of_text = (
        training(each, Layout(), tokens=0, lora_rank=8, kernels=SEPARATE) for each in (model, text)
    )
    sampled, sampled_text = (
        sampling(each, 2, gpu=kind, reserve=kind.reserve(1), lora_rank=8) for each in (model, text)
    )

    assert trained.weights - of_text.weights == 2 * tower.parameters
    assert sampled.weights - sampled_text.weights == 2 * tower.parameters
    assert trained.images == sampled.images > tower.image_bytes
    assert trained.trained == of_text.trained
    assert sampled_text.kv_cache - sampled.kv_cache == sampled.images + 2 * tower.parameters


def test_a_full_fine_tune_trains_no_tower() -> None:
    model = read(CONFIGS[QWEN3])

    with_tower, without = (
        training(each, Layout(), tokens=512, lora_rank=None, kernels=SEPARATE)
        for each in (model, replace(model, tower=None))
    )

    assert with_tower.trained == without.trained


def test_a_plan_says_what_engines_do_not_adapt() -> None:
    planned = plan(read(CONFIGS[GEMMA3]), parse("8xH100"), sequence_length=4096, lora_rank=32)

    reasons = {(reason.choice, reason.value): reason.why for reason in planned.reasons}
    assert planned.trainer.backend == "torch"
    assert "output layer" in reasons["adapters", "with train_unembed=False"]


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        (QWEN2_5, {"depth": None}, "depth"),
        (QWEN2_5, {"patch_size": [14, 14]}, "patch_size"),
        (QWEN3, {"deepstack_visual_indexes": 3}, "deepstack_visual_indexes"),
        (GEMMA3, {"vision_use_head": True}, "vision_use_head"),
    ],
)
def test_a_tower_that_would_be_counted_wrong_is_refused_by_name(
    name: str, changes: dict[str, Any], field: str
) -> None:
    config = deepcopy(CONFIGS[name])
    config["vision_config"] |= changes

    with pytest.raises(UnknownArchitecture, match=field):
        read(config)


def test_a_vision_language_model_without_its_vision_config_is_refused() -> None:
    with pytest.raises(UnknownArchitecture, match="vision_config"):
        read(CONFIGS[QWEN3] | {"vision_config": None})
