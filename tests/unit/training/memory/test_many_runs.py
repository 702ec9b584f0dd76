"""Many runs of mixed ranks on one engine, which has memory for a few of them."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.trainers import held_models
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.memory_report import KEPT_FREE_BYTES
from tinkercloud_worker.engine.trainer import OptimizerStep, TrainingPass
from tinkercloud_worker.engine.turns.engine_thread import EngineThread, NoBackground
from tinkercloud_worker.engine.turns.fair_queue import Share
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.model_memory import ModelMemory
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer
from tinkercloud_worker.training.paging import DiskFiles

RUNS, STEPS = 64, 3
ADAM = AdamParams(learning_rate=1e-2)
ROOM = 12
"""Adapters of the largest rank that fit at the same time."""

LARGEST = 4
"""A run with the largest rank."""


def rank_of(run: int) -> int:
    return (1, 2, 4, 8, 16)[run % 5]


def room(trainer: TorchTrainer) -> int:
    return ROOM * held_models(trainer)[str(LARGEST)].full_bytes


def a_pass(trainer: TorchTrainer, run: int) -> TrainingPass:
    request = a_request(random_data([3 + run % 5, 4], seed=run))
    return TrainingPass(str(run), prepare(request, trainer.limits))


def a_trainer(folder: Path | None) -> TorchTrainer:
    """Return a trainer with all runs; with a folder, it has memory for few of them."""
    largest = TorchTrainer(TorchBaseModel(tiny_llama()), max_batch_tokens=64)
    largest.add_model(str(LARGEST), LoraConfig(rank=rank_of(LARGEST), seed=1))
    size = room(largest) + KEPT_FREE_BYTES

    made: list[TorchTrainer] = []

    def available() -> int:
        return size - sum(each.memory_bytes(run) for each in made for run in held_models(each))

    trainer = TorchTrainer(
        TorchBaseModel(tiny_llama()),
        max_batch_tokens=64,
        memory=ModelMemory(available, DiskFiles(folder, 1 << 30)) if folder else None,
    )
    made.append(trainer)
    for run in range(RUNS):
        trainer.add_model(str(run), LoraConfig(rank=rank_of(run), seed=run))
    return trainer


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    started = EngineThread(on_crash=lambda error: None)
    started.start(NoBackground())
    yield started
    started.stop()


async def learn(thread: EngineThread, trainer: TorchTrainer, run: int) -> list[float]:
    """Return the losses of a client that takes its steps one after another."""
    losses, item = [], a_pass(trainer, run)
    for _ in range(STEPS):
        share = Share(f"owner-{run % 7}", str(run), item.batch.num_tokens)
        output = await thread.run_batched(trainer.batcher, item, share)
        losses.append(output.metrics["loss:sum"])
        await thread.run_batched(trainer.stepper, OptimizerStep(str(run), ADAM), share)
    return losses


def learn_alone(trainer: TorchTrainer, run: int) -> list[float]:
    losses, item = [], a_pass(trainer, run)
    for _ in range(STEPS):
        output = trainer.forward_backward(str(run), item.batch)
        losses.append(output.metrics["loss:sum"])
        trainer.optim_step(str(run), ADAM)
    return losses


# Several hundred passes: more than the usual limit on a machine with other work.
@pytest.mark.timeout(300)
@pytest.mark.long
async def test_64_runs_of_mixed_ranks_learn_as_alone_in_the_memory_of_twelve(
    thread: EngineThread, tmp_path: Path
) -> None:
    crowded, roomy = a_trainer(tmp_path), a_trainer(None)

    together = await asyncio.gather(*(learn(thread, crowded, run) for run in range(RUNS)))

    alone = [learn_alone(roomy, run) for run in range(RUNS)]
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    assert np.all(np.array(together)[:, -1] < np.array(together)[:, 0])
    held: Mapping[str, int] = {name: crowded.memory_bytes(name) for name in held_models(crowded)}
    assert sum(held.values()) <= room(roomy)
    for name, size in held.items():
        assert size in (0, roomy.memory_bytes(name))
