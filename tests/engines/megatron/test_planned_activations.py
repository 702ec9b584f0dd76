"""The planner's activation estimates against the megatron trainer's bfloat16 activations.

Latent attention is not tested here: unlike GPU kernels, torch's CPU kernels keep it in float32,
including the scores of all pairs of positions.
"""

from datetime import timedelta
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from transformers import AutoConfig

from tinkercloud_planning.activations import SEPARATE, layer_values
from tinkercloud_planning.families import read
from tinkercloud_planning.layouts import Layout
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.ranks.ranks import often
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.training.trainers import base_of, held_models
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.megatron_trainer.devices.cpu import Cpu
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.model import blank
from tinkercloud_worker.megatron_trainer.trainer import MegatronTrainer

pytestmark = [
    pytest.mark.slow,
    # megatron-core warns of its own defaults.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

RANK = 8
TOKENS = (64, 128)
SMALL: dict[str, Any] = {"vocab_size": 512, "max_position_embeddings": 1024}
# Sizes of a layer are the public model's (Qwen3-0.6B), or have its proportions: Qwen3-30B-A3B,
# with an eighth of its experts, and Mixtral-8x7B.
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Qwen3-MoE": {
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "Mixtral": {
        "model_type": "mixtral",
        "hidden_size": 512,
        "intermediate_size": 1792,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
    },
}


def trainer_of(config: dict[str, Any]) -> MegatronTrainer:
    """Return a trainer of a random model that has one adapter."""
    settings = dict(config)
    loaded = AutoConfig.for_model(settings.pop("model_type"), **settings)
    base, _ = blank(loaded, torch.bfloat16, Parallelism(), Cpu())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in base.module.parameters():
            weight.uniform_(-0.03, 0.03, generator=generator)
    trainer = MegatronTrainer(base, max_batch_tokens=max(TOKENS))
    trainer.add_model("m", LoraConfig(rank=RANK))
    return trainer


def kept(trainer: MegatronTrainer, tokens: int) -> int:
    """Return the bytes that a pass of one sequence keeps for its backward pass, without weights."""
    batch = prepare(a_request(random_data([tokens])), trainer.limits)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.forward_backward("m", batch)
    weights = [*base_of(trainer).module.parameters(), held_models(trainer)["m"].trainable.flat]
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in saved}
    return sum(each.nbytes() for place, each in storages.items() if place not in known)


@pytest.mark.parametrize("name", often(SHAPES, ["Mixtral"]))
def test_what_the_megatron_trainer_keeps_of_a_layer_is_estimated_within_a_tenth(
    alone: timedelta, name: str
) -> None:
    config = SHAPES[name] | SMALL
    growth = []
    for layers in (2, 3):
        trainer = trainer_of(config | {"num_hidden_layers": layers})
        # A layer's rounded adapters are as many for one token: they are not counted.
        fewer, more = (kept(trainer, tokens) for tokens in TOKENS)
        growth.append((more - fewer) / (TOKENS[1] - TOKENS[0]))
        parallel_state.destroy_model_parallel()

    model = read(config | {"num_hidden_layers": 2})
    estimate = layer_values(model, model.repeated, Layout(), RANK, SEPARATE)
    assert estimate == pytest.approx(growth[1] - growth[0], rel=0.1)
