"""What a running head consists of: its periodic tasks, and the steps of startup and shutdown.

`Lifecycle` runs the head from these lists, and a test compares them with a running head.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.serve.idle_memory import IdleMemory
from tinkercloud_worker.head.serve.service import HeadService

_SWEEP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Head:
    """The components of a head whose engine is loaded."""

    service: HeadService
    backend: Backend
    idle_memory: IdleMemory
    accept_requests: Callable[[], None]
    """Lets requests wait no longer for the engine."""
    expect_leases: Callable[[], None]
    """Stops the head from now on if no API server holds its lease."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """The running `TASKS`."""


@dataclass(frozen=True, slots=True)
class HeadStep:
    """Something that a head does once, periodically, or for as long as it runs."""

    name: str
    """Name of an asyncio task in `TASKS`."""
    run: Callable[[Head], Coroutine[Any, Any, None]]


async def _drop_results(head: Head) -> None:
    head.service.results.sweep()


async def _free_idle_memory(head: Head) -> None:
    await head.idle_memory.check(head.service.status())


SWEEP = (
    HeadStep("drop results that are too old", _drop_results),
    HeadStep("free memory of an idle head", _free_idle_memory),
)
"""Periodic steps, every 30 seconds, one after another."""


async def _sweep(head: Head) -> None:
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        for step in SWEEP:
            await step.run(head)


TASKS = (HeadStep("sweep", _sweep),)
"""What runs as long as the engine is loaded. Components have tasks of their own."""


async def _start_tasks(head: Head) -> None:
    head.tasks.extend(asyncio.create_task(task.run(head), name=task.name) for task in TASKS)


async def _accept_requests(head: Head) -> None:
    head.accept_requests()


async def _expect_leases(head: Head) -> None:
    head.expect_leases()


STARTUP = (
    HeadStep("start the tasks", _start_tasks),
    HeadStep("accept requests", _accept_requests),
    HeadStep("expect leases of API servers", _expect_leases),
)
"""Steps after the engine is loaded, in order."""


async def _end_tasks(head: Head) -> None:
    for task in head.tasks:
        task.cancel()


async def _close_service(head: Head) -> None:
    head.service.close()


async def _stop_losses(head: Head) -> None:
    await asyncio.to_thread(head.backend.losses.close)


async def _close_sampler(head: Head) -> None:
    await head.backend.sampler.close()


async def _stop_engine(head: Head) -> None:
    await asyncio.to_thread(head.backend.thread.stop)


SHUTDOWN = (
    HeadStep("end the tasks", _end_tasks),
    HeadStep("close the service", _close_service),
    HeadStep("stop the processes of custom losses", _stop_losses),
    HeadStep("close the sampler", _close_sampler),
    HeadStep("stop the engine thread", _stop_engine),
)
"""Steps after all models are suspended or lost, in order.

`Lifecycle` suspends them before, from the stop signal on: clients still get results meanwhile, and
an engine that is still loading may have to be loaded first.
"""
