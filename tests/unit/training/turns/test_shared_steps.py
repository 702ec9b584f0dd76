"""Optimizer steps of several models are one update, with the bits of each alone."""

import asyncio
import threading
from collections.abc import Mapping, Sequence

import pytest
import torch

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.trainers import held_models
from tinkercloud_worker.engine.trainer import OptimizerStep
from tinkercloud_worker.engine.turns.engine_thread import (
    Batcher,
    EngineThread,
    NoBackground,
    PieceLimit,
    Pieces,
    YieldPoint,
)
from tinkercloud_worker.engine.turns.fair_queue import Share
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

STEPS = {
    "plain": AdamParams(),
    "same": AdamParams(),
    "clipped": AdamParams(grad_clip_norm=0.5),
    "decayed": AdamParams(learning_rate=0.01, beta1=0.8, weight_decay=0.1),
}


def a_trainer() -> TorchTrainer:
    """Return a trainer whose models have weights and gradients; one has taken a step before."""
    trainer = TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=64)
    for seed, name in enumerate(STEPS):
        trainer.add_model(name, LoraConfig(rank=2 + seed, seed=seed))
    give_gradients(trainer, 0)
    trainer.optim_step("same", AdamParams())
    give_gradients(trainer, 1)
    return trainer


def give_gradients(trainer: TorchTrainer, seed: int) -> None:
    torch.manual_seed(seed)
    for name in STEPS:
        held_models(trainer)[name].trainable.gradient.normal_()


def weights(trainer: TorchTrainer, name: str) -> torch.Tensor:
    return held_models(trainer)[name].trainable.flat.detach()


def steps() -> list[OptimizerStep]:
    return [OptimizerStep(name, params) for name, params in STEPS.items()]


def test_models_get_the_bits_that_each_gets_alone() -> None:
    together, alone = a_trainer(), a_trainer()
    for seed in (2, 3):
        metrics = together.stepper.run_batch(steps(), lambda: None)
        expected = [alone.optim_step(name, params) for name, params in STEPS.items()]
        assert metrics == expected
        for name in STEPS:
            assert torch.equal(weights(together, name), weights(alone, name))
            assert not held_models(together)[name].trainable.gradient.any()
        for trainer in (together, alone):
            give_gradients(trainer, seed)


def test_a_step_computes_the_bits_of_torch_adamw() -> None:
    trainer = a_trainer()
    trainer.optim_step("decayed", STEPS["decayed"])
    twin = held_models(a_trainer())["decayed"].trainable
    optimizer = torch.optim.AdamW(
        [twin.flat], lr=0.01, betas=(0.8, 0.95), eps=1e-12, weight_decay=0.1, fused=True
    )

    optimizer.step()

    assert torch.equal(weights(trainer, "decayed"), twin.flat.detach())


def test_a_gradient_that_is_not_finite_leaves_every_model_unchanged() -> None:
    trainer, untouched = a_trainer(), a_trainer()
    held_models(trainer)["same"].trainable.gradient[3] = torch.nan

    with pytest.raises(InvalidRequest, match="NaN or infinity"):
        trainer.stepper.run_batch(steps(), lambda: None)

    for name in STEPS:
        assert torch.equal(weights(trainer, name), weights(untouched, name))
    assert held_models(trainer)["clipped"].trainable.gradient.any()


class Counted:
    """A batcher that records which items ran together."""

    def __init__(self, batcher: Batcher[OptimizerStep, Mapping[str, float]]) -> None:
        self._batcher = batcher
        self.batches: list[list[str]] = []

    def can_batch(self, items: Sequence[OptimizerStep], item: OptimizerStep) -> bool:
        return self._batcher.can_batch(items, item)

    def run_batch(
        self, items: Sequence[OptimizerStep], yield_point: YieldPoint
    ) -> Sequence[Mapping[str, float]]:
        self.batches.append([item.model_id for item in items])
        return self._batcher.run_batch(items, yield_point)

    def pieces(self, item: OptimizerStep, limit: PieceLimit) -> Pieces[Mapping[str, float]]:
        return self._batcher.pieces(item, limit)


async def run_together(counted: Counted) -> list[Mapping[str, float] | BaseException]:
    """Queue the steps of all models while the thread is busy, and return each's outcome."""
    thread = EngineThread(lambda _: None)
    thread.start(NoBackground())
    is_running, may_end = threading.Event(), threading.Event()

    def block(_: YieldPoint) -> None:
        is_running.set()
        may_end.wait()

    try:
        blocking = asyncio.create_task(thread.run(block, Share("other", "other", 1)))
        await asyncio.to_thread(is_running.wait)
        queued = [
            asyncio.create_task(
                thread.run_batched(counted, step, Share(step.model_id, step.model_id, 64))
            )
            for step in steps()
        ]
        await asyncio.sleep(0)
        may_end.set()
        await blocking
        return await asyncio.gather(*queued, return_exceptions=True)
    finally:
        may_end.set()
        await asyncio.to_thread(thread.stop)


def test_steps_that_wait_run_as_one_job() -> None:
    counted = Counted(a_trainer().stepper)

    outcomes = asyncio.run(run_together(counted))

    assert [sorted(batch) for batch in counted.batches] == [sorted(STEPS)]
    assert not any(isinstance(outcome, BaseException) for outcome in outcomes)


def test_a_step_that_fails_in_company_fails_alone() -> None:
    trainer, alone = a_trainer(), a_trainer()
    held_models(trainer)["same"].trainable.gradient[3] = torch.nan

    outcomes = dict(zip(STEPS, asyncio.run(run_together(Counted(trainer.stepper))), strict=True))

    assert isinstance(outcomes.pop("same"), InvalidRequest)
    for name, outcome in outcomes.items():
        assert outcome == alone.optim_step(name, STEPS[name])
        assert torch.equal(weights(trainer, name), weights(alone, name))
    assert not held_models(trainer)["same"].trainable.gradient.any()


def test_a_removed_model_does_not_join() -> None:
    trainer = a_trainer()
    trainer.remove_model("same")

    assert not trainer.stepper.can_batch([], OptimizerStep("same", AdamParams()))
    assert trainer.stepper.can_batch([], OptimizerStep("plain", AdamParams()))


def test_two_steps_of_one_model_do_not_join() -> None:
    trainer = a_trainer()
    step = OptimizerStep("plain", AdamParams())

    assert not trainer.stepper.can_batch([step], step)
