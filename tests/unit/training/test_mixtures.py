"""Mixtures of experts with the torch trainer: what is adapted, and what is refused by name."""

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.training import AdamParams, LoraConfig
from tinkercloud_testing.data import a_request, random_data
from tinkercloud_testing.models import VOCAB_SIZE
from tinkercloud_worker.base_model import BaseModel
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer


def tiny_mixture() -> PreTrainedModel:
    torch.manual_seed(3)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            moe_intermediate_size=24,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=128,
            initializer_range=0.15,
        )
    )


def a_trainer() -> TorchTrainer:
    return TorchTrainer(BaseModel(tiny_mixture()), max_batch_tokens=64)


def test_adapters_of_experts_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="train_mlp: this model keeps its experts in fused"):
        a_trainer().add_model("m", LoraConfig(rank=4))


def test_logprobs_of_a_fresh_adapter_are_huggingfaces() -> None:
    trainer, reference = a_trainer(), tiny_mixture().eval()
    [datum] = random_data([20])
    trainer.add_model("m", LoraConfig(rank=4, train_mlp=False))

    output = trainer.forward("m", prepare(a_request([datum]), trainer.limits), lambda: None)

    ids = torch.from_numpy(datum.tokens.astype(np.int64))
    targets = torch.from_numpy(datum.inputs["target_tokens"])
    with torch.no_grad():
        expected = torch.log_softmax(reference(ids[None]).logits[0], -1)
    np.testing.assert_allclose(
        output.logprobs[0], expected.gather(1, targets[:, None])[:, 0].numpy(), atol=1e-5
    )


@pytest.mark.parametrize("lora", [LoraConfig(rank=4, seed=1, train_mlp=False), None])
def test_attention_is_adapted_and_all_of_a_mixture_is_fine_tuned(lora: LoraConfig | None) -> None:
    trainer = a_trainer()
    trainer.add_model("m", lora)
    batch = prepare(a_request(random_data([20, 12])), trainer.limits)

    losses = []
    for _ in range(6):
        losses.append(trainer.forward_backward("m", batch, lambda: None).metrics["loss:sum"])
        trainer.optim_step("m", AdamParams(learning_rate=1e-2))

    assert losses[-1] < 0.9 * losses[0]
