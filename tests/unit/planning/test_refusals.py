"""What is said of a model that does not fit."""

import json
import re
from pathlib import Path

import pytest

from tinkercloud_planning.architecture import Architecture
from tinkercloud_planning.blocks import MissingFields
from tinkercloud_planning.families import read
from tinkercloud_planning.gpus import parse
from tinkercloud_planning.plan import plan, plan_training
from tinkercloud_planning.refusal import DoesNotFit

pytestmark = pytest.mark.timeout(300)

MODELS: dict[str, Architecture] = {
    name: read(model["config"])
    for name, model in json.loads(
        (Path(__file__).parent / "public_models.json").read_text()
    ).items()
}


def test_a_refusal_says_when_nothing_known_is_enough() -> None:
    with pytest.raises(DoesNotFit, match="found no change that would fit"):
        plan(MODELS["deepseek-ai/DeepSeek-V3"], parse("1xL4"), sequence_length=8192, lora_rank=None)


def test_a_refusal_names_the_rank_that_would_fit_and_training_alone() -> None:
    model, fleet = MODELS["deepseek-ai/DeepSeek-V3"], parse("64xH100")

    with pytest.raises(DoesNotFit, match="LoRA of rank 8; --train-only"):
        plan(model, fleet, sequence_length=8192, lora_rank=32)

    plan(model, fleet, sequence_length=8192, lora_rank=8)
    plan_training(model, fleet, sequence_length=8192, lora_rank=32)


def test_a_sequence_longer_than_the_model_takes_is_refused() -> None:
    with pytest.raises(DoesNotFit, match=r"sequence_length: 40961.*16 to 40960"):
        plan(MODELS["Qwen/Qwen3-8B"], parse("8xH100"), sequence_length=40961, lora_rank=8)


@pytest.mark.parametrize(("gpus", "rank"), [("1xA100-40", 32), ("2xH100", 32), ("2xH100", None)])
def test_a_refusal_names_as_much_memory_as_a_gpu_has_or_more(gpus: str, rank: int | None) -> None:
    for model in MODELS.values():
        try:
            plan(model, parse(gpus), sequence_length=4096, lora_rank=rank)
        except DoesNotFit as refused:
            has, *needs = map(
                float, re.findall(r"(?:has|need|sampled,|sampling) ([\d.]+) GiB", f"{refused}")
            )
            assert len(needs) == 2
            assert max(needs) >= has


def test_what_fits_alone_is_refused_with_what_both_need_on_one_gpu() -> None:
    with pytest.raises(DoesNotFit) as refused:
        plan(
            MODELS["meta-llama/Llama-3.1-8B"],
            parse("1xA100-40"),
            sequence_length=8192,
            lora_rank=32,
        )

    assert "enough for training alone, or for sampling alone" in str(refused.value)
    assert "sampling 40.4 GiB" in str(refused.value)
    assert "neighbour 16.3 GiB" in str(refused.value)


def test_a_refusal_of_training_alone_names_gpus_that_fit_and_no_lengths_that_do_not() -> None:
    model = MODELS["Qwen/Qwen3-30B-A3B"]

    with pytest.raises(DoesNotFit) as refused:
        plan_training(model, parse("1xA100-40"), sequence_length=8192, lora_rank=32)

    named = str(refused.value).partition("What would fit: ")[2].rstrip(".").split("; ")
    assert named == ["1xA100-80", "2xA100-40"]
    for fleet in named:
        plan_training(model, parse(fleet), sequence_length=8192, lora_rank=32)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"])
def test_all_fields_that_a_configuration_lacks_are_named_at_once(name: str) -> None:
    public = json.loads((Path(__file__).parent / "public_models.json").read_text())
    config = public[name]["config"]
    lacking = {"hidden_size", "num_hidden_layers", "vocab_size"}

    with pytest.raises(MissingFields) as refused:
        read({field: value for field, value in config.items() if field not in lacking})

    assert set(refused.value.names) == lacking
    assert all(field in str(refused.value) for field in lacking)


def test_a_configuration_with_nothing_but_its_type_learns_what_it_lacks() -> None:
    with pytest.raises(MissingFields) as refused:
        read({"model_type": "deepseek_v3"})

    assert {"hidden_size", "n_routed_experts", "n_shared_experts"} <= set(refused.value.names)
