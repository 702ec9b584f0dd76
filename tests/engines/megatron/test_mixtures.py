"""Mixtures of experts on one megatron rank, in this process, against torch and Hugging Face."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.ranks.megatron import megatron_trainer
from tinkercloud_testing.small_models.data import random_data
from tinkercloud_testing.small_models.models import (
    save,
    tiny_deepseek_v2,
    tiny_deepseek_v3,
    tiny_llama,
    tiny_mixtral,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.trainers import (
    assert_close,
    assert_equal,
    gradient_of,
    moments_of,
    run,
)
from tinkercloud_worker.engine.trainer import DirectTrainer, Gradient
from tinkercloud_worker.lora.experts import ALIGNED_BYTES
from tinkercloud_worker.megatron_trainer.devices.cpu import Cpu
from tinkercloud_worker.megatron_trainer.layers import grouped_experts
from tinkercloud_worker.megatron_trainer.layers.megatron_adapters import Active
from tinkercloud_worker.megatron_trainer.layers.mixtures import Mixture, check
from tinkercloud_worker.megatron_trainer.layers.parallelism import Parallelism
from tinkercloud_worker.megatron_trainer.model import load
from tinkercloud_worker.model.architecture import UnsupportedModelError
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

pytestmark = [
    pytest.mark.slow,
    # megatron-core warns of its own defaults.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron.*"),
]

LENGTHS = [5, 17, 3, 11]
LORA = LoraConfig(rank=4, seed=1)
CLIPPED = AdamParams(learning_rate=1e-3, eps=1e-8, grad_clip_norm=5)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": tiny_qwen3_moe,
    "qwen3, shares among all": lambda: tiny_qwen3_moe(normed=False),
    "mixtral": tiny_mixtral,
}
DEEPSEEKS: dict[str, Callable[[], PreTrainedModel]] = {
    "deepseek v2": tiny_deepseek_v2,
    "deepseek v3": tiny_deepseek_v3,
}
"""Their adapters have a page of their own: `test_deepseek`."""


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_every_lora_gradient_equal_the_torch_trainers(
    alone: timedelta, tmp_path: Path, name: str
) -> None:
    torch_trainer = TorchTrainer(TorchBaseModel(MODELS[name]()), max_batch_tokens=32)
    torch_trainer.add_model("m", LORA)
    run(torch_trainer, random_data([6, 9], seed=9))
    torch_trainer.optim_step("m", AdamParams(learning_rate=5e-2))
    megatron = megatron_trainer(str(save(MODELS[name](), tmp_path)), 1, 1)
    megatron.add_model("m", LORA)
    megatron.import_state("m", torch_trainer.export_state("m"))
    data = random_data(LENGTHS)

    got, expected = run(megatron, data), run(torch_trainer, data)

    np.testing.assert_allclose(
        np.concatenate(got.logprobs), np.concatenate(expected.logprobs), atol=1e-5
    )
    np.testing.assert_array_equal(got.expert_tokens, expected.expert_tokens)
    gradient = gradient_of(megatron)
    for tensor, other in gradient_of(torch_trainer).items():
        assert (gradient[tensor] - other).norm() <= 1e-4 * other.norm(), tensor


def test_a_tokens_logprob_is_huggingfaces_whatever_else_is_in_the_batch(
    alone: timedelta, tmp_path: Path
) -> None:
    megatron = megatron_trainer(str(save(tiny_qwen3_moe(), tmp_path)), 1, 1)
    megatron.add_model("m", LORA)
    data = random_data(LENGTHS)

    together = run(megatron, data)
    apart = [run(megatron, [datum]) for datum in data]

    for got, single, datum in zip(together.logprobs, apart, data, strict=True):
        logits = tiny_qwen3_moe().eval()(torch.tensor(datum.tokens[None].astype(np.int64))).logits
        targets = torch.tensor(datum.inputs["target_tokens"])[:, None]
        expected = torch.log_softmax(logits[0].detach(), -1).gather(1, targets)[:, 0]
        np.testing.assert_allclose(got, expected, atol=1e-5)
        np.testing.assert_allclose(single.logprobs[0], expected, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_equal_the_torch_trainers_which_then_continues_from_their_state(
    alone: timedelta, tmp_path: Path, name: str
) -> None:
    trainers: list[DirectTrainer] = [
        megatron_trainer(str(save(MODELS[name](), tmp_path)), 1, 1),
        TorchTrainer(TorchBaseModel(MODELS[name]()), max_batch_tokens=32),
    ]
    losses: list[list[float]] = []
    for trainer in trainers:
        trainer.add_model("m", LORA)
        losses.append([])
        for seed in range(10):
            losses[-1].append(run(trainer, random_data(LENGTHS, seed=seed)).metrics["loss:sum"])
            trainer.optim_step("m", AdamParams(learning_rate=1e-2))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    state = trainers[0].export_state("m")

    trainers[1].import_state("m", state)

    back = trainers[1].export_state("m")
    assert_equal(back.weights.tensors, state.weights.tensors, atol=0)
    assert_equal(moments_of(back), moments_of(state), atol=0)
    outputs = [run(trainer, random_data(LENGTHS, seed=11)) for trainer in trainers]
    ours, theirs = (np.concatenate(output.logprobs) for output in outputs)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("make", [*MODELS.values(), *DEEPSEEKS.values()], ids=MODELS | DEEPSEEKS)
def test_ten_steps_of_a_fully_fine_tuned_mixture_go_as_the_torch_trainers(
    alone: timedelta, tmp_path: Path, make: Callable[[], PreTrainedModel]
) -> None:
    trainers: list[DirectTrainer] = [
        megatron_trainer(str(save(make(), tmp_path)), 1, 1),
        TorchTrainer(TorchBaseModel(make()), max_batch_tokens=32),
    ]
    gradients: list[Gradient] = []
    losses: list[list[float]] = []
    for trainer in trainers:
        trainer.add_model("m", None)
        run(trainer, random_data(LENGTHS))
        gradients.append(gradient_of(trainer))
        losses.append([])
        for seed in range(10):
            losses[-1].append(run(trainer, random_data(LENGTHS, seed=seed)).metrics["loss:sum"])
            trainer.optim_step("m", CLIPPED)

    assert_close(*gradients, rtol=1e-4)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    state = trainers[0].export_state("m")
    trainers[1].import_state("m", state)
    back = trainers[1].export_state("m")
    assert_equal(moments_of(back), moments_of(state), atol=0)


def test_loading_lists_all_weights_a_few_times_not_for_each_of_them(
    alone: timedelta, tmp_path: Path
) -> None:
    folder = save(tiny_qwen3_moe(), tmp_path)
    listing = patch.object(
        GPTModel, "state_dict", autospec=True, side_effect=torch.nn.Module.state_dict
    )

    with listing as listed:
        base = load(str(folder), torch.float32, Parallelism(), Cpu())

    assert len(list(base.module.parameters())) > 20
    assert 1 <= listed.call_count <= 4


def test_layers_without_experts_among_those_with_them_are_rejected(
    alone: timedelta, tmp_path: Path
) -> None:
    model = tiny_qwen3_moe()
    model.config.mlp_only_layers = [0]
    model.config.save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModelError, match=r"mlp_only_layers \[0\].*backend torch"):
        megatron_trainer(str(tmp_path), 1, 1)


def test_expert_parallelism_without_experts_is_rejected(alone: timedelta, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"expert_parallel is 2, .* no experts"):
        megatron_trainer(str(save(tiny_llama(), tmp_path)), 1, 1, expert=2)


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        (Parallelism(expert=3), "4, is not divisible by trainer.expert_parallel 3"),
        (Parallelism(tensor=5), "intermediate size, 24, .*tensor_parallel 5"),
    ],
)
def test_experts_are_divided_evenly(parallelism: Parallelism, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check(Mixture(experts=4, chosen=2, width=24, normed=True), parallelism)


def test_one_expert_of_weight_one_is_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match="one expert with weight 1"):
        check(Mixture(experts=4, chosen=1, width=24, normed=True), Parallelism())


def test_bfloat16_distinguishes_the_tokens_of_a_thousand_adapters() -> None:
    places = [slice(number, number + 1) for number in range(1000)]
    active = [Active({}, 1.0, inside=place, between=place) for place in places]

    columns = grouped_experts._columns(active, torch.zeros(1000, 1, 8, dtype=torch.bfloat16))

    assert columns.shape[-1] * columns.element_size() == ALIGNED_BYTES
    assert torch.equal(grouped_experts._numbers(columns.flatten(0, 1)), torch.arange(1000))
