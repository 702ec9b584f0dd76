"""The megatron trainer's memory: recomputed layers, chunked logits, bfloat16.

These passes give the same numbers with less memory.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from tinkercloud_planning.activations import SEPARATE
from tinkercloud_planning.families import read
from tinkercloud_planning.layouts import Layout
from tinkercloud_planning.memory import training
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.ranks.megatron import megatron_trainer
from tinkercloud_testing.ranks.ranks import BATCH_TOKENS
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import (
    VOCAB_SIZE,
    save,
    tiny_deepseek_v3,
    tiny_llama,
    tiny_qwen3,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.trainers import base_of, held_models
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.megatron_trainer.devices.cpu import Cpu
from tinkercloud_worker.megatron_trainer.layers import vocabulary_logprobs
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.layers.sequence import MicroBatch
from tinkercloud_worker.megatron_trainer.model import load
from tinkercloud_worker.megatron_trainer.trainer import MegatronTrainer
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.training.trained_model import TrainedModel

pytestmark = [
    pytest.mark.slow,
    # megatron-core warns of its own defaults.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

LENGTHS = [30, 30, 7]
ADAPTER = LoraConfig(rank=4, seed=1)
CASES = {
    "adapter": (tiny_qwen3, ADAPTER),
    "untied, adapter": (tiny_llama, ADAPTER),
    "whole": (tiny_qwen3, None),
    "mixture": (tiny_qwen3_moe, ADAPTER),
    "deepseek": (tiny_deepseek_v3, ADAPTER),
}


def begin(trainer: MegatronTrainer, lora: LoraConfig | None) -> None:
    """Add a model whose weights have moved off the base's, the same ones every time."""
    trainer.add_model("m", lora)
    generator = torch.Generator().manual_seed(1)
    flat = held_models(trainer)["m"].trainable.flat.detach()
    flat.add_(0.1 * torch.randn(flat.shape, generator=generator))


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes of what is kept for a backward pass meanwhile."""
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def run(trainer: MegatronTrainer) -> tuple[np.ndarray, torch.Tensor, int]:
    """Return logprobs, gradient, and the bytes that were kept for the backward pass."""
    batch = prepare(a_request(random_data(LENGTHS)), trainer.limits)
    trainer.discard_gradient("m")
    with counted() as kept:
        output = trainer.forward_backward("m", batch)
    gradient = held_models(trainer)["m"].trainable.gradient.clone()
    return np.concatenate(output.logprobs), gradient, sum(kept)


@pytest.mark.parametrize("name", CASES)
def test_layers_recomputed_give_the_same_gradient_and_keep_little(
    alone: timedelta, tmp_path: Path, name: str
) -> None:
    make, lora = CASES[name]
    keeping = megatron_trainer(str(save(make(), tmp_path)), 1, 1)
    again = MegatronTrainer(base_of(keeping), max_batch_tokens=BATCH_TOKENS, max_kept_tokens=0)
    begin(keeping, lora)
    begin(again, lora)

    _, expected, kept = run(keeping)
    _, gradient, little = run(again)

    assert expected.any()
    assert torch.equal(gradient, expected)
    assert little < kept / 2


def test_only_larger_micro_batches_are_recomputed(alone: timedelta, tmp_path: Path) -> None:
    keeping = megatron_trainer(str(save(tiny_qwen3(), tmp_path)), 1, 1)
    large = MegatronTrainer(
        base_of(keeping), max_batch_tokens=BATCH_TOKENS, max_kept_tokens=BATCH_TOKENS
    )
    begin(keeping, ADAPTER)
    begin(large, ADAPTER)

    assert run(large)[2] == run(keeping)[2]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("most", [None, 0], ids=["kept", "computed again"])
def test_a_forward_pass_keeps_nothing_for_a_backward_pass(
    alone: timedelta, tmp_path: Path, name: str, most: int | None
) -> None:
    make, lora = CASES[name]
    trainer = megatron_trainer(str(save(make(), tmp_path)), 1, 1, max_kept_tokens=most)
    begin(trainer, lora)
    expected, gradient, kept = run(trainer)

    batch = prepare(a_request(random_data(LENGTHS)), trainer.limits)
    with counted() as kept_forward:
        output = trainer.forward("m", batch)

    assert kept
    # Losses are differentiated by their logprobs, in passes of both kinds.
    assert sum(kept_forward) == expected.nbytes
    np.testing.assert_allclose(np.concatenate(output.logprobs), expected, atol=1e-5)
    assert torch.equal(held_models(trainer)["m"].trainable.gradient, gradient)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_of_a_few_positions_at_a_time_and_give_the_same_logprobs_and_gradient(
    alone: timedelta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, lora = CASES[name]
    trainer = megatron_trainer(str(save(make(), tmp_path)), 1, 1)
    begin(trainer, lora)
    expected, gradient, _ = run(trainer)

    rows = 7
    monkeypatch.setattr(vocabulary_logprobs, "_LOGITS_BYTES", rows * 4 * trainer.limits.vocab_size)
    got, again, _ = run(trainer)
    batch = prepare(a_request(random_data(LENGTHS)), trainer.limits)
    logits = {shape for shape in trainer.matrices("m", batch) if shape[-1] == VOCAB_SIZE}

    assert max(math.prod(shape[:-1]) for shape in logits) == rows
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert (again - gradient).norm() <= 1e-5 * gradient.norm()


def test_a_base_in_bfloat16_has_logprobs_and_gradients_of_its_rounding(
    alone: timedelta, tmp_path: Path
) -> None:
    folder = str(save(tiny_qwen3(), tmp_path))
    exact = megatron_trainer(folder, 1, 1)
    begin(exact, ADAPTER)
    logprobs, gradient, _ = run(exact)
    parallel_state.destroy_model_parallel()

    rounded = MegatronTrainer(
        load(folder, torch.bfloat16, Parallelism(), Cpu()), max_batch_tokens=BATCH_TOKENS
    )
    begin(rounded, ADAPTER)
    got, approximate, _ = run(rounded)

    assert {weight.dtype for weight in base_of(rounded).module.parameters()} == {torch.bfloat16}
    assert approximate.dtype == torch.float32
    assert np.abs(got - logprobs).mean() <= 0.05
    assert (approximate - gradient).norm() <= 0.1 * gradient.norm()


def test_a_pass_of_a_full_model_rounds_it_once_as_planned(
    alone: timedelta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save(tiny_qwen3(), tmp_path))
    base = load(folder, torch.bfloat16, Parallelism(), Cpu())
    trainer = MegatronTrainer(base, max_batch_tokens=BATCH_TOKENS, max_kept_tokens=0)
    begin(trainer, None)
    loss, replaced_weights = trainer._loss, trainer._replaced_weights
    rounded: list[Tensor] = []

    def note_weights(model: TrainedModel) -> dict[str, Tensor]:
        replaced = replaced_weights(model)
        # The embedding is the model's own.
        rounded.extend(w for w in replaced.values() if w.dtype == torch.bfloat16)
        return replaced

    def note_head(
        micro_batch: MicroBatch, lm_head: Callable[[MicroBatch], LMHead], *arguments: Any
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        rounded.append(lm_head(micro_batch).linear.weight)
        return loss(micro_batch, lm_head, *arguments)

    monkeypatch.setattr(trainer, "_replaced_weights", note_weights)
    monkeypatch.setattr(trainer, "_loss", note_head)
    run(trainer)

    assert sum(weight.shape[0] == VOCAB_SIZE for weight in rounded) > 1
    weights = [*base.module.parameters(), *rounded]
    sizes = {weight.data_ptr(): weight.nbytes for weight in weights}
    planned = training(
        read(tiny_qwen3().config.to_dict()), Layout(), tokens=0, lora_rank=None, kernels=SEPARATE
    )
    assert sum(sizes.values()) == planned.weights + planned.activations
