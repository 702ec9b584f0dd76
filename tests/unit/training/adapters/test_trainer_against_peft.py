"""The torch trainer against Hugging Face + PEFT + torch autograd, in float32.

Tolerances: loss and logprobs 1e-5, LoRA gradients 1e-4 relative, losses of ten steps 1e-5 relative,
parameters after them 1e-6.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.small_models.data import counting_every_token, random_data
from tinkercloud_testing.small_models.models import (
    tiny_deepseek_v2,
    tiny_deepseek_v3,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen2,
    tiny_qwen3,
)
from tinkercloud_testing.training.peft_twin import PeftTwin
from tinkercloud_testing.training.trainers import (
    assert_close,
    changing_hyperparameters,
    held_models,
    run,
)
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

LENGTHS = [5, 17, 3, 11]
MODELS = {
    "llama": tiny_llama,
    "tied llama": lambda: tiny_llama(tied=True),
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "gpt2": tiny_gpt2,
    "deepseek v2": tiny_deepseek_v2,
    "deepseek v3": tiny_deepseek_v3,
}
MIXTURES = {"deepseek v2", "deepseek v3"}


def make_trainer(
    base: PreTrainedModel, lora_config: LoraConfig, max_batch_tokens: int = 24
) -> TorchTrainer:
    trainer = TorchTrainer(TorchBaseModel(base), max_batch_tokens=max_batch_tokens)
    trainer.add_model("m", lora_config)
    perturb(trainer, "m")
    return trainer


def perturb(trainer: TorchTrainer, model_id: str) -> None:
    """Move B off zero, so that A has a gradient too."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in held_models(trainer)[model_id].trainable.tensors.items():
        if "lora_B" in name:
            tensor.detach().normal_(0, 0.05, generator=generator)


def gradients(trainer: TorchTrainer, model_id: str = "m") -> dict[str, Tensor]:
    tensors = held_models(trainer)[model_id].trainable.tensors
    return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_loss_and_every_lora_gradient_equal_pefts(name: str) -> None:
    trainer = make_trainer(
        MODELS[name](), LoraConfig(rank=4, seed=1, train_mlp=name not in MIXTURES)
    )
    twin = PeftTwin(MODELS[name](), trainer.copy_weights("m"))
    data = random_data(LENGTHS)

    output = run(trainer, data)
    expected_loss = twin.backward(data)

    for got, expected in zip(output.logprobs, twin.logprobs(data), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(expected_loss, abs=1e-5 * len(data))
    assert_close(gradients(trainer), twin.gradients(), rtol=1e-4)


POLICY_LOSSES = {
    "importance_sampling": ({}, lambda lp, x: -torch.exp(lp - x["logprobs"]) * x["advantages"]),
    "ppo": (
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        lambda lp, x: (
            -torch.minimum(
                (r := torch.exp(lp - x["logprobs"])) * x["advantages"],
                r.clamp(0.9, 1.1) * x["advantages"],
            )
        ),
    ),
    "cispo": (
        {},
        lambda lp, x: -torch.exp(lp - x["logprobs"]).clamp(0, 4).detach() * lp * x["advantages"],
    ),
    "dro": (
        {"beta": 0.05},
        lambda lp, x: -(lp * x["advantages"] - 0.025 * (lp - x["logprobs"]) ** 2),
    ),
    "gspo": (
        {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
        lambda lp, x: (
            -torch.minimum(
                (
                    s := torch.exp(
                        ((lp.detach() - x["logprobs"]) * x["sequence_ratio_mask"]).sum()
                        / x["sequence_ratio_mask"].sum()
                        + lp
                        - lp.detach()
                    )
                )
                * x["advantages"],
                s.clamp(0.5, 2.0) * x["advantages"],
            )
        ),
    ),
}


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_each_policy_loss_has_the_gradient_of_its_formula(loss_fn: str) -> None:
    config, formula = POLICY_LOSSES[loss_fn]
    trainer = make_trainer(tiny_llama(), LoraConfig(rank=4, seed=1))
    twin = PeftTwin(tiny_llama(), trainer.copy_weights("m"))
    data = random_data(LENGTHS, policy=True)
    if loss_fn == "gspo":
        data = counting_every_token(data)

    output = run(trainer, data, loss_fn, config)
    expected_loss = twin.backward(data, formula)

    assert output.metrics["loss:sum"] == pytest.approx(expected_loss, rel=1e-5)
    assert_close(gradients(trainer), twin.gradients(), rtol=1e-4)


def test_ten_steps_with_changing_hyperparameters_equal_torch_adamw() -> None:
    trainer = make_trainer(tiny_llama(), LoraConfig(rank=4, seed=1))
    twin = PeftTwin(tiny_llama(), trainer.copy_weights("m"))

    losses = []
    for step in range(10):
        data, params = random_data(LENGTHS, seed=step), changing_hyperparameters(step)
        losses.append((run(trainer, data).metrics["loss:sum"], twin.backward(data)))
        trainer.optim_step("m", params)
        twin.optim_step(params)

    ours, theirs = zip(*losses, strict=True)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    tensors = trainer.copy_weights("m").tensors
    for name, expected in twin.parameters().items():
        np.testing.assert_allclose(tensors[name], expected.detach(), atol=1e-6)
