"""Layers recomputed in the backward pass: the same numbers with less memory."""

from collections.abc import Callable

import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import tiny_gpt2, tiny_llama, tiny_qwen3
from tinkercloud_testing.training.trainers import held_models
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

LORA = LoraConfig(rank=4, seed=1)
LENGTHS = [30, 30, 7]


def gradient_and_kept_bytes(
    model: PreTrainedModel, lora: LoraConfig | None, max_kept_tokens: int | None
) -> tuple[torch.Tensor, int]:
    """Return the gradient of two models' passes in turn, and what the last of them kept."""
    trainer = TorchTrainer(
        TorchBaseModel(model), max_batch_tokens=64, max_kept_tokens=max_kept_tokens
    )
    batch = prepare(a_request(random_data(LENGTHS)), trainer.limits)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    trainer.add_model("other", LoraConfig(rank=2, seed=5))
    trainer.add_model("m", lora)
    torch.nn.init.normal_(held_models(trainer)["m"].trainable.flat, std=0.1)
    trainer.forward_backward("other", batch)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.forward_backward("m", batch)
    return held_models(trainer)["m"].trainable.gradient, sum(kept)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, tiny_gpt2])
@pytest.mark.parametrize("lora", [LORA, None], ids=["adapter", "whole"])
def test_layers_recomputed_give_the_same_gradient(
    make: Callable[[], PreTrainedModel], lora: LoraConfig | None
) -> None:
    torch.manual_seed(0)
    kept, _ = gradient_and_kept_bytes(make(), lora, None)
    torch.manual_seed(0)

    again, _ = gradient_and_kept_bytes(make(), lora, 0)

    assert kept.any()
    assert torch.equal(again, kept)


def test_only_larger_micro_batches_are_recomputed_and_keep_little() -> None:
    tokens = 2 * max(LENGTHS)

    _, all_kept = gradient_and_kept_bytes(tiny_llama(layers=6), LORA, None)
    _, fits = gradient_and_kept_bytes(tiny_llama(layers=6), LORA, tokens)
    _, larger = gradient_and_kept_bytes(tiny_llama(layers=6), LORA, tokens - 1)

    assert fits == all_kept
    assert larger < all_kept / 2
