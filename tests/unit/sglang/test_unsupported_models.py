"""Models that SGLang computes differently from their configuration are rejected, and no others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tinkercloud_planning.families import read
from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    InferenceConfig,
    Limits,
    SamplerConfig,
    TrainerConfig,
)
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.models import byte_tokenizer
from tinkercloud_worker.build_sampler import check_model, inference_sampler
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.inference.client import ServerError
from tinkercloud_worker.inference.weight_host import HeadWeightHost
from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.run_head import build_backend

PUBLIC_MODELS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "planning" / "public_models.json").read_text()
)
POSITIONS = 4096
NARROW = {"max_position_embeddings": POSITIONS, "sliding_window": 1000}
KINDS = ["full_attention", "sliding_attention"]


def a_folder(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def a_head(
    folder: Path, *, longest: int | None = None, backend: Any = "sglang", kind: Any = "sglang"
) -> HeadConfig:
    inference = InferenceConfig(kind=kind, urls=("http://127.0.0.1:9",), recovery_seconds=0.1)
    return HeadConfig(
        head="h",
        generation="g",
        model=BaseModelSource(name="acme/model", path=str(folder)),
        token_file="",
        checkpoint_root="",
        scratch_dir=str(folder / "scratch"),
        trainer=TrainerConfig(backend="none"),
        sampler=SamplerConfig(backend=backend, inference=inference),
        limits=Limits(max_context_length=longest) if longest else Limits(),
    )


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral"},
        {"model_type": "mistral", "layer_types": KINDS, "num_hidden_layers": 2},
        {"model_type": "mixtral"},
        {"model_type": "phi3"},
        {"model_type": "qwen3_moe", "use_sliding_window": True},
        {"model_type": "starcoder2"},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "layer_types": KINDS,
            "num_hidden_layers": 2,
        },
    ],
    ids=str,
)
def test_sequences_beyond_a_window_that_sglang_ignores_are_rejected(
    config: dict[str, Any], tmp_path: Path
) -> None:
    folder = a_folder(tmp_path / "model", NARROW | config)

    for head in (a_head(folder), a_head(folder, longest=1001), a_head(folder, backend="external")):
        with pytest.raises(UnsupportedModelError, match=r"sliding_window: .* to 1000 or less"):
            check_model(head)
    check_model(a_head(folder, longest=1000))
    check_model(a_head(folder, backend="external", kind="vllm"))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": POSITIONS},
        {"model_type": "mistral", "layer_types": KINDS[:1], "num_hidden_layers": 1},
        {"model_type": "mixtral", "sliding_window": None},
        {"model_type": "qwen2", "use_sliding_window": False},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 99},
        {"model_type": "qwen3_moe", "use_sliding_window": False},
        # SGLang supports its windows.
        {"model_type": "gpt_oss"},
    ],
    ids=str,
)
def test_models_without_such_windows_are_accepted(config: dict[str, Any], tmp_path: Path) -> None:
    check_model(a_head(a_folder(tmp_path / "model", NARROW | config)))


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_planned_context_lengths_are_accepted(name: str, tmp_path: Path) -> None:
    config = PUBLIC_MODELS[name]["config"]
    folder = a_folder(tmp_path / "model", config)

    check_model(a_head(folder, longest=read(config).max_context_length))


def test_a_head_rejects_windows_before_loading_anything(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "model", NARROW | {"model_type": "mistral"})

    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        build_backend(a_head(folder))


@pytest.mark.parametrize("backend", ["sglang", "external"])
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
async def test_adapters_of_the_output_layer_of_gemma_are_rejected(
    family: str, backend: str, tmp_path: Path
) -> None:
    folder = a_folder(tmp_path / "model", {"model_type": family})
    sampler = inference_sampler(a_head(folder, backend=backend), byte_tokenizer(), HeadWeightHost())

    with pytest.raises(InvalidRequest, match="train_unembed=False"):
        await sampler.publish("v", WeightsCopy(LoraConfig(rank=1), {}))
    await sampler.close()


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
async def test_adapters_of_the_experts_of_some_families_are_rejected(
    family: str, tmp_path: Path
) -> None:
    folder = a_folder(tmp_path / "model", {"model_type": family})
    sampler = inference_sampler(a_head(folder), byte_tokenizer(), HeadWeightHost())

    with pytest.raises(InvalidRequest, match="train_mlp=False"):
        await sampler.publish("v", WeightsCopy(LoraConfig(rank=1), {}))
    await sampler.close()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
async def test_adapters_of_uncompressed_latent_queries_are_rejected(
    family: str, tmp_path: Path
) -> None:
    folder = a_folder(tmp_path / "model", {"model_type": family, "q_lora_rank": None})
    sampler = inference_sampler(a_head(folder), byte_tokenizer(), HeadWeightHost())

    with pytest.raises(InvalidRequest, match="train_attn=False"):
        await sampler.publish("v", WeightsCopy(LoraConfig(rank=1), {}))
    await sampler.close()


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        ({"model_type": "gemma2"}, LoraConfig(rank=1, train_unembed=False)),
        ({"model_type": "gemma4_text"}, LoraConfig(rank=1)),
        ({"model_type": "llama"}, LoraConfig(rank=1)),
        ({"model_type": "mixtral"}, LoraConfig(rank=1, train_mlp=False)),
        ({"model_type": "deepseek_v2", "q_lora_rank": 8}, LoraConfig(rank=1)),
        (
            {"model_type": "deepseek_v2", "q_lora_rank": None},
            LoraConfig(rank=1, train_attn=False),
        ),
    ],
    ids=str,
)
async def test_other_adapters_reach_the_servers(
    config: dict[str, Any], lora: LoraConfig, tmp_path: Path
) -> None:
    folder = a_folder(tmp_path / "model", config)
    sampler = inference_sampler(
        a_head(folder, backend="external"), byte_tokenizer(), HeadWeightHost()
    )
    weights = {"model.layers.0.self_attn.q_proj.lora_A": torch.ones(1, 8)}

    with pytest.raises(ServerError, match="no inference server responds"):
        await sampler.publish("v", WeightsCopy(lora, weights))
    await sampler.close()
