"""Full fine-tuning over a bfloat16 base: gradients accumulate in float32.

The expected values are float64 sums of the same bfloat16 factors.
"""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tinkercloud_protocol.requests.tensors import Datum
from tinkercloud_testing.small_models.models import VOCAB_SIZE, save, tiny_llama
from tinkercloud_testing.training.lookups import gradient_of_lookups
from tinkercloud_testing.training.trainers import base_of, held_models, run
from tinkercloud_worker.lora.parameters import gradient_of
from tinkercloud_worker.megatron_trainer import trainer as megatron
from tinkercloud_worker.megatron_trainer.devices.cpu import Cpu
from tinkercloud_worker.megatron_trainer.layers import vocabulary_logprobs
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.model import load
from tinkercloud_worker.megatron_trainer.trainer import MegatronTrainer
from tinkercloud_worker.model.lm_head import LMHead

pytestmark = [
    pytest.mark.slow,
    # megatron-core warns of its own defaults.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

LENGTH, ROWS = 500, 4
EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


def begin(folder: Path, *, tied: bool) -> MegatronTrainer:
    base = load(str(save(tiny_llama(tied=tied), folder)), torch.bfloat16, Parallelism(), Cpu())
    trainer = MegatronTrainer(base, max_batch_tokens=LENGTH)
    trainer.add_model("m", None)
    return trainer


def a_sequence() -> Datum:
    """Return one of few tokens, each many times, all of which are predicted."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, LENGTH)
    targets = rng.integers(0, VOCAB_SIZE, LENGTH)
    weights = np.ones(LENGTH, np.float32)
    return Datum(tokens.astype(np.int32), {"target_tokens": targets, "weights": weights})


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Compute logits of a few rows at a time, and note hidden states and targets of all."""
    seen: list[Tensor] = []

    def noted(output_layer: LMHead, hidden: Tensor, targets: Tensor, *rest: Any) -> Tensor:
        seen.extend((hidden.detach(), targets))
        return vocabulary_logprobs.logprobs(output_layer, hidden, targets, *rest)

    monkeypatch.setattr(megatron, "logprobs", noted)
    monkeypatch.setattr(vocabulary_logprobs, "_LOGITS_BYTES", ROWS * 4 * VOCAB_SIZE)
    return seen


def gradient_of_products(weight: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the output layer's gradient of the summed loss."""
    logits = hidden @ weight.to(hidden.dtype).T
    dlogits = logits.float().softmax(1)
    dlogits.scatter_add_(1, targets, torch.full(targets.shape, -1.0))
    return dlogits.bfloat16().double().T @ hidden.double()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_of_the_vocabulary_are_sums_over_all_positions_in_float32(
    alone: timedelta, tmp_path: Path, entered: list[Tensor], *, tied: bool
) -> None:
    trainer = begin(tmp_path, tied=tied)
    lookups = gradient_of_lookups(base_of(trainer).module.embedding.word_embeddings)

    run(trainer, [a_sequence()])

    weights = held_models(trainer)["m"].trainable.tensors
    head = weights[EMBEDDING if tied else OUTPUT_LAYER]
    of_products, of_lookups = gradient_of_products(head.detach(), *entered), lookups()
    expected = {EMBEDDING: of_lookups, OUTPUT_LAYER: of_products}
    if tied:
        expected = {EMBEDDING: of_lookups + of_products}
    errors = {
        name: float((gradient_of(weights[name]) - gradient).norm() / gradient.norm())
        for name, gradient in expected.items()
    }
    assert max(errors.values()) <= 3e-3, errors


def test_the_gradient_of_a_layer_is_accumulated_before_the_next_layer_is_computed(
    alone: timedelta, tmp_path: Path
) -> None:
    trainer = begin(tmp_path, tied=False)
    weights = held_models(trainer)["m"].trainable.tensors
    added: list[set[str]] = []

    def note(_gradient: Tensor) -> None:
        added.append({name for name, weight in weights.items() if gradient_of(weight).any()})

    def follow(_layer: nn.Module, _arguments: Any, given: Mapping[str, Tensor]) -> None:
        given["hidden_states"].register_hook(note)

    base_of(trainer).module.decoder.layers[1].register_forward_pre_hook(follow, with_kwargs=True)
    run(trainer, [a_sequence()])

    [before] = added
    assert before == {name for name in weights if "layers.0" not in name} - {EMBEDDING}
