"""Runs trainers in tests and compares their results."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tinkercloud_protocol.requests.hyperparameters import AdamParams
from tinkercloud_protocol.requests.tensors import Datum
from tinkercloud_testing.small_models.data import a_request, random_data
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.engine.trainer import (
    DirectTrainer,
    Gradient,
    LossOutput,
    ModelHolder,
    Trainer,
    TrainingPass,
    TrainingState,
)
from tinkercloud_worker.engine.turns.engine_thread import EngineThread
from tinkercloud_worker.engine.turns.fair_queue import Share
from tinkercloud_worker.training.adam import AdamTrainer
from tinkercloud_worker.training.paging import Models


def run(
    trainer: DirectTrainer,
    data: Sequence[Datum],
    loss_fn: str = "cross_entropy",
    config: Mapping[str, float | str] | None = None,
    model_id: str = "m",
) -> LossOutput:
    """Add the gradient of a batch to a model's."""
    batch = prepare(a_request(data, loss_fn, config=config), trainer.limits)
    return trainer.forward_backward(model_id, batch)


async def together(
    thread: EngineThread, trainer: Trainer, passes: Sequence[TrainingPass]
) -> list[LossOutput | BaseException]:
    """Run passes of different owners that wait at the same time; return results and errors."""
    batcher = trainer.batcher
    may_end = threading.Event()
    busy = asyncio.create_task(thread.run(lambda _: may_end.wait()))
    await asyncio.sleep(0)
    tasks = [
        asyncio.create_task(
            thread.run_batched(
                batcher, each, Share(each.model_id, each.model_id, each.batch.num_tokens)
            )
        )
        for each in passes
    ]
    await asyncio.sleep(0)
    may_end.set()
    await busy
    return await asyncio.gather(*tasks, return_exceptions=True)


def changing_hyperparameters(step: int) -> AdamParams:
    """Return hyperparameters that differ from step to step."""
    return AdamParams(
        learning_rate=1e-2 / (step + 1),
        beta1=0.9 - 0.02 * step,
        beta2=0.95 - 0.01 * step,
        eps=1e-12 * (step + 1),
        weight_decay=0.01 * step,
        grad_clip_norm=0.5 if step % 2 else 0.0,
    )


def ten_changing_steps(lengths: Sequence[int]) -> list[tuple[list[Datum], AdamParams]]:
    """Return ten batches with examples of these lengths and a changing one, with
    hyperparameters."""
    return [
        (random_data([*lengths, 1 + step], seed=step), changing_hyperparameters(step))
        for step in range(10)
    ]


def gradient_of(trainer: ModelHolder, model_id: str = "m") -> Gradient:
    """Return the gradient of a model."""
    gradient = trainer.export_gradient(model_id)
    assert gradient is not None, f"{model_id} has no gradient"
    return gradient


def moments_of(state: TrainingState) -> Mapping[str, Tensor]:
    """Return the moments of a state."""
    assert state.moments is not None, "the state has no moments"
    return state.moments


def assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], *, rtol: float) -> None:
    """Compare tensors by name, each by the norm of its difference."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        error, length = (ours[name] - expected).norm(), expected.norm()
        assert error <= rtol * length, f"{name}: {error:.2e} off, which is {length:.2e} long"


def assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], *, atol: float) -> None:
    """Compare tensors by name, element by element."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, atol=atol, rtol=0, msg=name)


def held_models(trainer: AdamTrainer) -> Models:
    """Return the models of a trainer, with their vectors, to change or to compare them."""
    return trainer._models


def base_of(trainer: Any) -> Any:
    """Return the base model of a trainer: a TorchBaseModel, or a megatron one."""
    return trainer._base
