"""Models that share a pass of the base get the same results as alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.small_models.data import a_request, counting_every_token, random_data
from tinkercloud_testing.small_models.models import (
    in_dtype,
    tiny_gemma2,
    tiny_llama,
    tiny_qwen3_moe,
)
from tinkercloud_testing.training.trainers import held_models
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.trainer import TrainingPass
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

ADAPTERS = {
    "low": LoraConfig(rank=2, seed=1),
    "high": LoraConfig(rank=8, seed=2, train_unembed=False),
    "attention": LoraConfig(rank=4, seed=3, train_mlp=False),
}


def a_trainer(
    model: PreTrainedModel | None = None,
    *,
    max_batch_tokens: int = 64,
    dtype: torch.dtype = torch.float32,
) -> TorchTrainer:
    base = TorchBaseModel(in_dtype(model or tiny_llama(), dtype))
    trainer = TorchTrainer(base, max_batch_tokens=max_batch_tokens)
    for seed, (name, adapter) in enumerate(ADAPTERS.items()):
        trainer.add_model(name, adapter)
        torch.manual_seed(seed)
        torch.nn.init.normal_(held_models(trainer)[name].trainable.flat, std=0.1)
    return trainer


def a_pass(
    trainer: TorchTrainer, model_id: str, lengths: Sequence[int], loss_fn: str = "cross_entropy"
) -> TrainingPass:
    policy = loss_fn != "cross_entropy"
    data = random_data(lengths, policy=policy, seed=len(model_id))
    return TrainingPass(model_id, prepare(a_request(data, loss_fn), trainer.limits))


def gradient(trainer: TorchTrainer, model_id: str) -> torch.Tensor:
    return held_models(trainer)[model_id].trainable.gradient


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling"])
def test_each_model_gets_the_logprobs_loss_and_gradient_that_it_gets_alone(loss_fn: str) -> None:
    together, alone = a_trainer(), a_trainer()
    passes = [
        a_pass(together, name, lengths, loss_fn)
        for name, lengths in zip(ADAPTERS, ([5, 9], [3], [7, 2, 8]), strict=True)
    ]

    outputs = together.run_batch(passes, lambda: None)

    expected = [alone.forward_backward(p.model_id, p.batch) for p in passes]
    for output, other in zip(outputs, expected, strict=True):
        for ours, theirs in zip(output.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert output.metrics == pytest.approx(other.metrics, rel=1e-5)
    for name in ADAPTERS:
        sought = gradient(alone, name)
        assert sought.any()
        assert (gradient(together, name) - sought).norm() <= 1e-5 * sought.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_diverged_model_does_not_affect_others_in_its_pass(
    value: float, dtype: torch.dtype
) -> None:
    together, alone = a_trainer(dtype=dtype), a_trainer(dtype=dtype)
    held_models(together)["low"].trainable.flat.detach()[::7] = value
    passes = [a_pass(together, name, [5, 6]) for name in ADAPTERS]

    together.run_batch(passes, lambda: None)

    for each in passes[1:]:
        alone.forward_backward(each.model_id, each.batch)
        theirs = gradient(alone, each.model_id)
        error = (gradient(together, each.model_id) - theirs).norm()
        assert error <= 0.02 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_is_not_finite_stays_with_its_model(dtype: torch.dtype) -> None:
    together, alone = a_trainer(dtype=dtype), a_trainer(dtype=dtype)
    passes = [a_pass(together, name, [5, 6], "importance_sampling") for name in ADAPTERS]
    for example in passes[0].batch.examples:
        example.inputs["advantages"][:] = 3e38

    together.run_batch(passes, lambda: None)

    assert not gradient(together, "low").isfinite().all()
    for each in passes[1:]:
        alone.forward_backward(each.model_id, each.batch)
        theirs = gradient(alone, each.model_id)
        error = (gradient(together, each.model_id) - theirs).norm()
        assert error <= 0.02 * theirs.norm()


def test_rows_of_zero_weight_do_not_change_the_gradients_of_other_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tinkercloud_worker.torch_trainer.logprobs._LOGITS_BYTES", 4 * 264 * 4)
    together, alone = a_trainer(), a_trainer()
    passes = [a_pass(together, name, [6, 3]) for name in ADAPTERS]
    for each in passes:
        for example in each.batch.examples:
            example.inputs["weights"][::2] = 0

    together.run_batch(passes, lambda: None)

    for each in passes:
        alone.forward_backward(each.model_id, each.batch)
        theirs = gradient(alone, each.model_id)
        error = (gradient(together, each.model_id) - theirs).norm()
        assert error <= 1e-5 * theirs.norm()


def test_small_passes_of_different_models_join() -> None:
    trainer = a_trainer()
    first, second = a_pass(trainer, "low", [20]), a_pass(trainer, "high", [20, 20])

    assert trainer.can_batch([first], second)


def test_passes_that_exceed_a_micro_batch_do_not_join() -> None:
    trainer = a_trainer()
    first, second = a_pass(trainer, "low", [20]), a_pass(trainer, "high", [20, 25])

    assert not trainer.can_batch([first], second)


def test_no_passes_join_where_equal_bits_are_demanded() -> None:
    trainer = TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=64, max_shared_tokens=0)
    for name, adapter in ADAPTERS.items():
        trainer.add_model(name, adapter)

    assert not trainer.can_batch([a_pass(trainer, "low", [2])], a_pass(trainer, "high", [2]))


def test_passes_of_one_model_do_not_join() -> None:
    trainer = a_trainer()

    assert not trainer.can_batch([a_pass(trainer, "low", [4])], a_pass(trainer, "low", [5]))


def test_a_loss_of_whole_sequences_does_not_join() -> None:
    trainer = a_trainer()
    data = counting_every_token(random_data([4], policy=True))
    of_sequences = TrainingPass("high", prepare(a_request(data, "gspo"), trainer.limits))

    assert not trainer.can_batch([a_pass(trainer, "low", [4])], of_sequences)
    assert not trainer.can_batch([of_sequences], a_pass(trainer, "low", [4]))


def test_models_with_different_losses_share_a_pass() -> None:
    together, alone = a_trainer(), a_trainer()
    passes = [
        a_pass(together, name, [5, 6], loss_fn)
        for name, loss_fn in zip(
            ADAPTERS, ("cross_entropy", "importance_sampling", "ppo"), strict=True
        )
    ]

    assert together.can_batch(passes[:2], passes[2])
    outputs = together.run_batch(passes, lambda: None)

    for each, output in zip(passes, outputs, strict=True):
        expected = alone.forward_backward(each.model_id, each.batch)
        assert output.metrics == pytest.approx(expected.metrics, rel=1e-5)
        theirs = gradient(alone, each.model_id)
        assert theirs.any()
        assert (gradient(together, each.model_id) - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_passes_share_a_pass_and_change_no_gradient(dtype: torch.dtype) -> None:
    trainer = a_trainer(dtype=dtype)
    passes = [
        TrainingPass(
            name, prepare(a_request(random_data([5, 7]), forward_only=True), trainer.limits)
        )
        for name in ADAPTERS
    ]

    assert trainer.can_batch(passes[:2], passes[2])
    assert not trainer.can_batch(passes[:1], a_pass(trainer, "high", [4]))
    outputs = trainer.run_batch(passes, lambda: None)

    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for each, output in zip(passes, outputs, strict=True):
        expected = trainer.forward(each.model_id, each.batch)
        assert output.metrics == pytest.approx(expected.metrics, rel=tolerance)
        for ours, theirs in zip(output.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=tolerance)
        assert not gradient(trainer, each.model_id).any()


def test_full_models_do_not_join() -> None:
    trainer = a_trainer()
    trainer.add_model("whole", None)

    assert not trainer.can_batch([a_pass(trainer, "low", [4])], a_pass(trainer, "whole", [4]))
    assert not trainer.can_batch([a_pass(trainer, "whole", [4])], a_pass(trainer, "low", [4]))


def test_a_model_that_was_removed_while_its_pass_waited_does_not_join() -> None:
    trainer = a_trainer()
    gone, waiting = a_pass(trainer, "low", [4]), a_pass(trainer, "high", [4])
    trainer.remove_model("low")

    assert not trainer.can_batch([waiting], gone)
    assert not trainer.can_batch([gone], waiting)


def test_models_of_an_architecture_that_takes_one_sequence_at_a_time_do_not_join() -> None:
    trainer = a_trainer(tiny_gemma2())

    assert not trainer.can_batch([a_pass(trainer, "low", [4])], a_pass(trainer, "high", [4]))


def test_a_mixture_of_experts_is_shared_as_well() -> None:
    together, alone = a_trainer(tiny_qwen3_moe()), a_trainer(tiny_qwen3_moe())
    passes = [a_pass(together, name, [5, 6]) for name in ADAPTERS]

    outputs = together.run_batch(passes, lambda: None)

    for each, output in zip(passes, outputs, strict=True):
        expected = alone.forward_backward(each.model_id, each.batch)
        np.testing.assert_allclose(output.logprobs[0], expected.logprobs[0], atol=1e-5)
        theirs = gradient(alone, each.model_id)
        assert (gradient(together, each.model_id) - theirs).norm() <= 1e-5 * theirs.norm()
