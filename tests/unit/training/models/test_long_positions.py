"""Contexts that a factor in config.json extends, and the numbers at their long positions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tinkercloud_api.providers.model_arguments import resolve
from tinkercloud_protocol.adapters.context_length import context_length
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.small_models.models import save
from tinkercloud_testing.small_models.vision import an_example
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.model.architecture import (
    UnsupportedModelError,
    max_context_length,
    read_config,
)
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.loading import load_pretrained
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
QWEN25 = {"model_type": "qwen2", "max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (QWEN25, 32768),
        (QWEN25 | {"rope_scaling": YARN}, 131072),
        (QWEN25 | {"rope_scaling": {**YARN, "rope_type": None, "type": "yarn"}}, 32768),
        (QWEN25 | {"rope_scaling": {"type": "yarn", "factor": 4}}, 131072),
        (QWEN25 | {"rope_parameters": {**YARN, "rope_theta": 1e6}}, 131072),
        (QWEN25 | {"rope_scaling": None, "rope_parameters": YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN}, 131072),
        (
            # DeepSeek-V3, which states the extended length.
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {**YARN, "factor": 40, "original_max_position_embeddings": 4096},
            },
            163840,
        ),
        (QWEN25 | {"rope_scaling": {"type": "linear", "factor": 2.5}}, 81920),
        (QWEN25 | {"rope_scaling": {"rope_type": "linear", "factor": 1.0}}, 32768),
        (QWEN25 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 32768),
        (QWEN25 | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, 32768),
        (
            # Llama 3.1, which states the extended length.
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    **YARN,
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        (
            # Phi-4-mini.
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096},
            },
            131072,
        ),
        (
            # Gemma 3, which scales some of its layers.
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131072,
        ),
        (QWEN25 | {"rope_scaling": {**YARN, "factor": "4"}}, 32768),
        (QWEN25 | {"rope_scaling": "yarn"}, 32768),
        ({}, 1 << 20),
        ({**QWEN25, "rope_scaling": {**YARN, "factor": float("nan")}}, 32768),
        ({**QWEN25, "rope_scaling": {**YARN, "factor": float("inf")}}, 32768),
        ({"max_position_embeddings": None}, 1 << 20),
    ],
)
def test_the_context_is_the_one_that_vllm_derives(config: dict[str, Any], length: int) -> None:
    assert context_length(config) == length


def a_model(**rope: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        rope_parameters={"rope_theta": 10000.0, **rope},
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "linear", "factor": 4.0},
    ],
)
def test_long_positions_have_the_numbers_of_transformers(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    folder = save(a_model(**rope), tmp_path / "model")
    examples = [an_example(length, [], seed=length) for length in (5, 64, 40)]
    trainer = TorchTrainer(TorchBaseModel(a_model(**rope)), max_batch_tokens=128)
    trainer.add_model("m", LoraConfig(rank=2, seed=1))

    output = trainer.forward("m", Batch(examples, "cross_entropy", True))

    assert max_context_length(read_config(str(folder))) == 64
    assert resolve("m", str(folder)).max_context_length == 64
    assert trainer.limits.max_context_length == 64
    for example, ours in zip(examples, output.logprobs, strict=True):
        with torch.no_grad():
            ids = torch.from_numpy(example.tokens.astype(np.int64))[None]
            logits = a_model(**rope)(input_ids=ids).logits[0]
        chosen = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(example.targets))[:, 0]
        np.testing.assert_allclose(ours, chosen.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ],
)
def test_a_model_whose_positions_depend_on_the_length_is_refused_with_a_remedy(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    folder = save(a_model(rope_type="default"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | scaling))

    with pytest.raises(UnsupportedModelError, match=r"factor 2\.0.*remove rope_scaling.*16 tokens"):
        load_pretrained(str(folder), torch.float32)


def test_a_dynamic_factor_of_one_changes_no_position(tmp_path: Path) -> None:
    folder = save(a_model(rope_type="dynamic", factor=1.0), tmp_path / "model")

    assert max_context_length(read_config(str(folder))) == 16


def test_an_older_file_with_rope_scaling_is_read_like_a_new_one(tmp_path: Path) -> None:
    folder = save(a_model(rope_type="default"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config["rope_scaling"] = {"type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))

    assert max_context_length(read_config(str(folder))) == 32
    assert resolve("m", str(folder)).max_context_length == 32
