"""Logits of a bfloat16 base are float32 without rounding, as in the torch trainer.

torch has no float32 product of bfloat16 matrices on a CPU, so the test replaces the accelerator's.
"""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.ranks.ranks import BATCH_TOKENS
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import in_dtype, save, tiny_qwen3
from tinkercloud_testing.training.trainers import base_of, held_models
from tinkercloud_worker.device import frozen_linear
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.lora.adapters import scale
from tinkercloud_worker.megatron_trainer import trainer as megatron
from tinkercloud_worker.megatron_trainer.devices.cpu import Cpu
from tinkercloud_worker.megatron_trainer.layers import vocabulary_logprobs
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.model import load
from tinkercloud_worker.megatron_trainer.trainer import MegatronTrainer
from tinkercloud_worker.model import lm_head
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.model.lm_head import LMHead
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = [
    pytest.mark.slow,
    # megatron-core warns of its own defaults.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

LENGTHS = [9, 14]
ADAPTER = LoraConfig(rank=4, seed=1)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LMHead, Tensor, Tensor]]:
    """Have products as an accelerator's, and note output layers, hidden states and targets."""
    seen: list[tuple[LMHead, Tensor, Tensor]] = []

    def product(left: Tensor, right: Tensor) -> Tensor:
        return left.float() @ right.float()

    def noted(layer: LMHead, hidden: Tensor, targets: Tensor, *rest: object) -> Tensor:
        seen.append((layer, hidden.detach(), targets))
        found: Tensor = vocabulary_logprobs.logprobs(layer, hidden, targets, *rest)  # type: ignore[arg-type]
        return found

    for module in (frozen_linear, lm_head):
        monkeypatch.setattr(module, "matmul_float32", product)
    monkeypatch.setattr(megatron, "logprobs", noted)
    return seen


def a_trainer(folder: Path, lora: LoraConfig | None) -> MegatronTrainer:
    """Return one over a base in bfloat16, of a model that has moved off it."""
    base = load(str(save(tiny_qwen3(), folder)), torch.bfloat16, Parallelism(), Cpu())
    trainer = MegatronTrainer(base, max_batch_tokens=BATCH_TOKENS)
    trainer.add_model("m", lora)
    flat = held_models(trainer)["m"].trainable.flat.detach()
    flat.add_(0.1 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(1)))
    return trainer


@pytest.mark.parametrize("lora", [ADAPTER, None], ids=["adapter", "whole"])
def test_logprobs_are_those_of_float32_logits_of_the_hidden_states(
    alone: timedelta,
    tmp_path: Path,
    layers: list[tuple[LMHead, Tensor, Tensor]],
    lora: LoraConfig | None,
) -> None:
    trainer = a_trainer(tmp_path, lora)
    batch = prepare(a_request(random_data(LENGTHS)), trainer.limits)

    output = trainer.forward_backward("m", batch)

    [(layer, hidden, targets)] = layers
    tensors = held_models(trainer)["m"].trainable.tensors
    logits = hidden.double() @ layer.linear.weight.double().T
    assert hidden.dtype == layer.linear.weight.dtype == torch.bfloat16
    if lora is not None:
        head = base_of(trainer).lm_head
        a, b = tensors[head.a_name].detach(), tensors[head.b_name].detach()
        logits += scale(lora.rank) * (hidden.double() @ a.double().T) @ b.double().T
    expected = logits.log_softmax(1).gather(1, targets)
    got = torch.cat([torch.from_numpy(output.logprobs[index]) for index in (1, 0)])
    torch.testing.assert_close(got.double(), expected[:, 0], atol=2e-5, rtol=0)


def test_the_lm_heads_logits_are_bit_for_bit_the_torch_trainers(
    alone: timedelta, tmp_path: Path, layers: list[tuple[LMHead, Tensor, Tensor]]
) -> None:
    trainer = a_trainer(tmp_path, ADAPTER)
    batch = prepare(a_request(random_data(LENGTHS)), trainer.limits)
    trainer.forward("m", batch)
    torch_trainer = TorchTrainer(
        TorchBaseModel(in_dtype(tiny_qwen3(), torch.bfloat16)), max_batch_tokens=32
    )
    torch_trainer.add_model("m", ADAPTER)
    torch_trainer.import_state("m", trainer.export_state("m"))

    [(layer, hidden, _)] = layers
    model = held_models(torch_trainer)["m"]
    of_torch = torch_trainer._lm_head_layer([(slice(0, len(hidden)), model)])

    with torch.no_grad():
        assert torch.equal(layer.logits(hidden), of_torch.logits(hidden))
