"""Plans agree with recipes that others publish for the same models and GPUs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_planning.families import read
from tinkercloud_planning.gpus import Fleet, gpu, parse
from tinkercloud_planning.search import Demand, best_trainer, smallest_engine

CONFIGS: dict[str, dict[str, Any]] = {
    name: model["config"]
    for name, model in json.loads(
        (Path(__file__).parent / "public_models.json").read_text()
    ).items()
}
FLOAT8 = CONFIGS["deepseek-ai/DeepSeek-V3"]
BFLOAT16 = {**FLOAT8, "quantization_config": None}


@pytest.mark.parametrize(
    ("config", "kind", "gpus"),
    [
        (FLOAT8, "H200", 8),
        (FLOAT8, "B200", 8),
        (FLOAT8, "H100", 16),
        (BFLOAT16, "H200", 16),
        (BFLOAT16, "H100", 32),
    ],
)
def test_engines_of_deepseek_v3_are_as_large_as_in_sglang_s_table(
    config: dict[str, Any], kind: str, gpus: int
) -> None:
    # https://docs.sglang.io/docs/basic_usage/deepseek_v3.md, "Launch DeepSeek V3.1/V3/R1"
    demand = Demand(read(config), 8192, lora_rank=1)

    engine = smallest_engine(demand, Fleet(gpu(kind), 8))

    assert engine is not None
    assert engine.tensor == gpus


@pytest.mark.parametrize(
    ("lora_rank", "recipe", "too_few"), [(32, "8xH100", "1xH100"), (None, "32xH100", "8xH100")]
)
def test_llama_70b_trains_on_the_gpus_of_megatron_bridge_s_recipes(
    lora_rank: int | None, recipe: str, too_few: str
) -> None:
    # https://docs.nvidia.com/nemo/megatron-bridge/nightly/apidocs/bridge/
    # bridge.perf_recipes.llama.h100.llama3.html: llama3_70b_lora_8gpu_h100_bf16_config and
    # llama3_70b_sft_32gpu_h100_bf16_config
    model = read(CONFIGS["meta-llama/Llama-3.3-70B-Instruct"])
    demand = Demand(model, 4096, lora_rank)

    assert best_trainer(demand, parse(recipe), engine=None)
    assert not best_trainer(demand, parse(too_few), engine=None)
