"""What is said of a model that does not fit."""

import json
from pathlib import Path

import pytest

from tinkercloud_crds.planning.architecture import Architecture
from tinkercloud_crds.planning.families import read
from tinkercloud_crds.planning.fleet import parse
from tinkercloud_crds.planning.offer import plan
from tinkercloud_crds.planning.refusal import DoesNotFit

MODELS: dict[str, Architecture] = {
    name: read(model["config"])
    for name, model in json.loads(
        (Path(__file__).parent / "public_models.json").read_text()
    ).items()
}


def test_a_refusal_says_when_nothing_known_is_enough() -> None:
    with pytest.raises(DoesNotFit, match="an engine has to fit one node"):
        plan(
            MODELS["deepseek-ai/DeepSeek-V3"], parse("64xH100"), sequence_length=8192, lora_rank=32
        )


def test_a_sequence_longer_than_the_model_takes_is_refused() -> None:
    with pytest.raises(DoesNotFit, match=r"sequence_length: 40961.*16 to 40960"):
        plan(MODELS["Qwen/Qwen3-8B"], parse("8xH100"), sequence_length=40961, lora_rank=8)
