"""Models whose requests have arrived share their passes and steps, one turn after another."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.bare_heads import SPEC, Head, a_head
from tinkercloud_worker.engine.turns import engine_thread

MODELS, STEPS = 8, 5


def record_sizes(patched: pytest.MonkeyPatch, batcher: Any) -> list[int]:
    """Return a list to which the number of items is added whenever several run as one."""
    sizes: list[int] = []
    kind = type(batcher)
    run_batch: Callable[..., Any] = kind.run_batch

    def recorded(self: Any, items: Sequence[Any], yield_point: Callable[[], None]) -> Any:
        sizes.append(len(items))
        return run_batch(self, items, yield_point)

    patched.setattr(kind, "run_batch", recorded)
    return sizes


async def train_together(models: Sequence[Head]) -> None:
    """Send all steps of all models while the engine is busy; return when it has done them."""
    for model in models:
        await model.begin()
        await model.answer(0)
    is_held, may_end = threading.Event(), threading.Event()

    def hold(_yield_point: object) -> None:
        is_held.set()
        may_end.wait()

    holding = asyncio.create_task(models[0].backend.thread.run(hold))
    await asyncio.to_thread(is_held.wait)
    for index, model in enumerate(models):
        for step in range(STEPS):
            model.add(2 * step + 1, first=5 + index)
            model.apply(2 * step + 2)

    def all_wait() -> bool:
        reasons = [model.service.why_waiting(f"{model.model}:1")[1] for model in models]
        return all(reason is not None and "for its turn" in reason for reason in reasons)

    await asyncio.to_thread(wait_until, all_wait, "all wait for the engine")
    may_end.set()
    await holding
    for model in models:
        await model.answer(2 * STEPS)


def of_one_owner(head: Head) -> list[Head]:
    return [replace(head, model=ModelId("s", index)) for index in range(MODELS)]


def of_as_many_owners(head: Head) -> list[Head]:
    names = [f"owner-{index}" for index in range(MODELS)]
    return [
        replace(head, model=ModelId(name, 0), spec=ModelSpec(owner=name, lora=SPEC.lora))
        for name in names
    ]


@pytest.mark.parametrize("models_of", [of_one_owner, of_as_many_owners])
async def test_eight_models_whose_requests_wait_share_each_pass_and_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models_of: Callable[[Head], list[Head]]
) -> None:
    # The loop of a loaded machine may need long to send the next requests to the engine.
    monkeypatch.setattr(engine_thread, "_FOLLOWED_SECONDS", 60)
    with a_head(tmp_path.as_uri(), tmp_path, "g1") as head:
        passes = record_sizes(monkeypatch, head.backend.trainer.batcher)
        steps = record_sizes(monkeypatch, head.backend.trainer.stepper)

        await train_together(models_of(head))

    assert passes == [MODELS] * STEPS
    assert steps == [MODELS] * STEPS
