"""What is said of a model that does not fit."""

import json
import re
from pathlib import Path

import pytest

from tinkercloud_planning.architecture import Architecture
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
