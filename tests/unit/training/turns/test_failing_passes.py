"""A pass that fails in company fails alone, and a long pass leaves room for others."""

from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
import torch
from typing_extensions import override

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.trainers import held_models, together
from tinkercloud_worker.device.packed_attention import PackedSequences
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.trainer import LossOutput, TrainingPass
from tinkercloud_worker.engine.turns.engine_thread import EngineThread, NoBackground
from tinkercloud_worker.losses import Loss
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import ModelSegments, TorchTrainer
from tinkercloud_worker.training.packing import Pack
from tinkercloud_worker.training.trained_model import TrainedModel

MODELS = ("bad", "clean", "pending")


class Faulty(TorchTrainer):
    """A trainer whose passes with the model "bad" fail once all gradients have been added."""

    fails = False
    num_passes = 0

    def __init__(self, base: TorchBaseModel, max_batch_tokens: int, **options: int | None) -> None:
        super().__init__(base, max_batch_tokens=max_batch_tokens, **options)  # type: ignore[arg-type]
        self.order: list[TrainedModel] = []
        """The models of all passes."""

    @override
    def _run(
        self, shares: Sequence[tuple[TrainedModel, Pack]], own_losses: Sequence[Loss]
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        self.num_passes += 1
        results = super()._run(shares, own_losses)
        if self.fails and any(model is self._models["bad"] for model, _ in shares):
            raise torch.OutOfMemoryError("a fault")
        return results

    @override
    def _counted_hidden(
        self, model_segments: ModelSegments, sequences: PackedSequences
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
        self.order.extend(model for _, model in model_segments)
        return super()._counted_hidden(model_segments, sequences)


def a_trainer(max_batch_tokens: int = 64, **options: int | None) -> Faulty:
    base = TorchBaseModel(tiny_llama())
    trainer = Faulty(base, max_batch_tokens, **options)
    for seed, name in enumerate(MODELS):
        trainer.add_model(name, LoraConfig(rank=4, seed=seed))
        torch.manual_seed(seed)
        torch.nn.init.normal_(held_models(trainer)[name].trainable.flat, std=0.1)
    trainer.forward_backward("pending", a_pass(trainer, "pending", [4]).batch)
    return trainer


def a_pass(
    trainer: TorchTrainer, model_id: str, lengths: Sequence[int], *, forward_only: bool = False
) -> TrainingPass:
    data = random_data(lengths, seed=len(model_id))
    request = a_request(data, "cross_entropy", forward_only=forward_only)
    return TrainingPass(model_id, prepare(request, trainer.limits))


def gradient(trainer: TorchTrainer, model_id: str) -> torch.Tensor:
    return held_models(trainer)[model_id].trainable.gradient


def equal(one: LossOutput, other: LossOutput) -> bool:
    return one.metrics == other.metrics and all(
        np.array_equal(*both) for both in zip(one.logprobs, other.logprobs, strict=True)
    )


@pytest.fixture
async def thread() -> AsyncIterator[EngineThread]:
    thread = EngineThread(on_crash=lambda error: pytest.fail(repr(error)))
    thread.start(NoBackground())
    yield thread
    thread.stop()


def test_a_shared_pass_that_fails_adds_no_gradient() -> None:
    trainer = a_trainer()
    trainer.fails = True
    before = {name: gradient(trainer, name).clone() for name in MODELS}

    with pytest.raises(torch.OutOfMemoryError):
        trainer.run_batch([a_pass(trainer, name, [5, 6]) for name in MODELS], lambda: None)

    assert before["pending"].any()
    for name in MODELS:
        assert torch.equal(gradient(trainer, name), before[name])


async def test_in_a_shared_pass_only_the_request_that_fails_alone_fails(
    thread: EngineThread,
) -> None:
    trainer, alone = a_trainer(), a_trainer()
    trainer.fails = True
    passes = [a_pass(trainer, name, [5, 6]) for name in MODELS]

    failed, *outputs = await together(thread, trainer, passes)

    assert isinstance(failed, torch.OutOfMemoryError)
    assert trainer.num_passes == 1 + 1 + 3
    for each, output in zip(passes[1:], outputs, strict=True):
        expected = alone.forward_backward(each.model_id, each.batch)
        assert isinstance(output, LossOutput)
        assert equal(output, expected)
        assert torch.equal(gradient(trainer, each.model_id), gradient(alone, each.model_id))


async def test_a_micro_batch_that_fails_fails_its_own_request_only(thread: EngineThread) -> None:
    trainer, alone = a_trainer(max_batch_tokens=8), a_trainer(max_batch_tokens=8)
    trainer.fails = True
    passes = [a_pass(trainer, name, [7, 8, 6, 8]) for name in MODELS]

    failed, *outputs = await together(thread, trainer, passes)

    assert isinstance(failed, torch.OutOfMemoryError)
    for each, output in zip(passes[1:], outputs, strict=True):
        assert isinstance(output, LossOutput)
        assert equal(output, alone.forward_backward(each.model_id, each.batch))


@pytest.mark.parametrize("recomputed", [None, 4], ids=["kept", "recomputed"])
async def test_passes_that_take_turns_by_micro_batch_give_the_bits_of_passes_alone(
    thread: EngineThread, recomputed: int | None
) -> None:
    trainer, alone = (a_trainer(8, max_kept_tokens=recomputed) for _ in range(2))
    trainer.add_model("whole", None)
    alone.add_model("whole", None)
    passes = [a_pass(trainer, name, [7, 8, 6, 8, 2]) for name in ("clean", "whole", "pending")]
    passes.append(a_pass(trainer, "bad", [8, 8, 8], forward_only=True))
    trainer.order.clear()

    outputs = await together(thread, trainer, passes)

    for each, output in zip(passes, outputs, strict=True):
        run = alone.forward if each.batch.forward_only else alone.forward_backward
        assert isinstance(output, LossOutput)
        assert equal(output, run(each.model_id, each.batch))
    for name in (*MODELS, "whole"):
        assert torch.equal(gradient(trainer, name), gradient(alone, name))
    # All had started before any had ended.
    assert len({id(model) for model in trainer.order[:4]}) == 4


async def test_a_large_request_runs_in_small_micro_batches_alongside_a_small_one_of_another_owner(
    thread: EngineThread,
) -> None:
    trainer, alone = a_trainer(max_batch_tokens=2048), a_trainer(max_batch_tokens=2048)
    large, small = a_pass(trainer, "clean", [100] * 25), a_pass(trainer, "pending", [50] * 5)
    trainer.num_passes = 0

    together_large, together_small = await together(thread, trainer, [large, small])

    # Micro-batches of twenty and five examples, in parts of the 256 tokens that are always allowed.
    assert trainer.num_passes == 10 + 3 + 1
    for each, output in ((large, together_large), (small, together_small)):
        expected = alone.forward_backward(each.model_id, each.batch)
        assert isinstance(output, LossOutput)
        for both in zip(output.logprobs, expected.logprobs, strict=True):
            np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-6)
        ours, theirs = (gradient(which, each.model_id) for which in (trainer, alone))
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


async def test_a_trainer_that_shares_no_pass_runs_a_large_request_as_if_it_were_alone(
    thread: EngineThread,
) -> None:
    trainer, alone = a_trainer(2048, max_shared_tokens=0), a_trainer(2048)
    large, small = a_pass(trainer, "clean", [100] * 25), a_pass(trainer, "pending", [50] * 5)

    outputs = await together(thread, trainer, [large, small])

    for each, output in zip((large, small), outputs, strict=True):
        assert isinstance(output, LossOutput)
        assert equal(output, alone.forward_backward(each.model_id, each.batch))
        assert torch.equal(gradient(trainer, each.model_id), gradient(alone, each.model_id))
