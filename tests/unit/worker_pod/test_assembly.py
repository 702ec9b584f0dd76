"""What a running head consists of.

A merge can remove a periodic task or a step together with nothing that fails. These lists are
written out here so that it can't be removed unnoticed.
"""

import asyncio
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS
from tinkercloud_testing.serving.served_heads import a_served_head
from tinkercloud_worker.custom_losses.processes import LossProcesses
from tinkercloud_worker.engine.turns.engine_thread import EngineThread
from tinkercloud_worker.head.order.kept_results import Results
from tinkercloud_worker.head.serve import assembly
from tinkercloud_worker.head.serve.idle_memory import IdleMemory
from tinkercloud_worker.head.serve.lifecycle import Lifecycle
from tinkercloud_worker.head.serve.service import HeadService
from tinkercloud_worker.torch_sampler.sampler import TorchSampler

SPEC = ModelSpec(owner="me", lora=LoraConfig(rank=2, seed=1))
STARTUP: list[tuple[type, str]] = [(Lifecycle, "expect_leases")]
"""Without the start of `TASKS` and the readiness, which are seen otherwise."""
SWEEP: list[tuple[type, str]] = [(Results, "sweep"), (IdleMemory, "check")]
SHUTDOWN: list[tuple[type, str]] = [
    (HeadService, "suspend"),
    (HeadService, "close"),
    (LossProcesses, "close"),
    (TorchSampler, "close"),
    (EngineThread, "stop"),
]
TASKS = {"_sweep", "Autosaver._work", "ModelQueue._work"}
"""Coroutines that run while a head has a model."""
OF_HTTP = {"LifespanOn.main", "Server.serve", "RequestResponseCycle.run_asgi"}


def follow(monkeypatch: pytest.MonkeyPatch, methods: list[tuple[type, str]]) -> list[str]:
    """Return the calls of methods from now on."""
    calls: list[str] = []

    def note(owner: type, name: str) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def noted(*args: object, **kwargs: object) -> object:
            calls.append(f"{owner.__name__}.{name}")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in methods:
        note(owner, name)
    return calls


def running(before: set[asyncio.Task[Any]]) -> set[str]:
    """Return the coroutines of new tasks, except those of the HTTP server."""
    new = asyncio.all_tasks() - before
    return {getattr(task.get_coro(), "__qualname__", "") for task in new} - OF_HTTP


def named(calls: list[tuple[type, str]]) -> list[str]:
    return [f"{owner.__name__}.{name}" for owner, name in calls]


async def test_a_running_head_has_all_tasks_and_takes_all_steps_of_its_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "_SWEEP_SECONDS", 0.01)
    swept, started = follow(monkeypatch, SWEEP), follow(monkeypatch, STARTUP)

    before = asyncio.all_tasks()
    async with a_served_head(tmp_path) as head, asyncio.timeout(PATIENCE_SECONDS):
        await head.begin("s:train:0", SPEC)
        while len(swept) < len(SWEEP):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
        # Requests, among others, are short tasks of their own.
        while running(before) != TASKS:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        stopped = follow(monkeypatch, SHUTDOWN)
    still_running = running(before)

    assert started == named(STARTUP)
    assert swept[: len(SWEEP)] == named(SWEEP)
    assert stopped[: len(SHUTDOWN)] == named(SHUTDOWN)
    assert [step.name for step in assembly.TASKS] == ["sweep"]
    assert len(assembly.SWEEP) == len(SWEEP)
    assert "_sweep" not in still_running
    assert len(assembly.STARTUP) == len(STARTUP) + len(["tasks", "readiness"])
    # Models are suspended before the first step, and that tasks have ended is seen otherwise.
    assert len(assembly.SHUTDOWN) == len(SHUTDOWN)
