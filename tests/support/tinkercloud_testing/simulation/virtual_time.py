"""An event loop whose time passes only when nothing else is to be done, and clocks that show it.

The order of callbacks depends on the history alone: not on the machine, its load or hash seeds.
"""

import asyncio
import contextlib
import math
import random
import selectors
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any
from unittest.mock import patch

from tinkercloud_kube import informer
from tinkercloud_operator.run import controller
from tinkercloud_operator.run.cluster import executor, save_requests
from tinkercloud_operator.run.pool import (
    base_models,
    pool_memory,
    pool_runner,
    spare_runner,
    tenant_runner,
)

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
"""The wall-clock time at which a history begins."""


class Deadlock(Exception):
    """Every task waits, and no timer will wake any of them."""


class _Jump(selectors.SelectSelector):
    """Skips the time until the next timer; no file is ever ready."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which starts at 0 seconds."""

    def __init__(self) -> None:
        """Create a loop that has not started."""
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jump.now


class Clock:
    """A wall clock in virtual time, which may be wrong.

    It takes the place of the class `datetime` in modules that only ask it for the time.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        """Create a clock that is right."""
        self._loop = loop
        self.error = timedelta(0)
        """How far it is ahead of the right time."""

    def now(self, zone: tzinfo | None = UTC) -> datetime:
        """Return the time that it shows."""
        return (START + timedelta(seconds=self._loop.time()) + self.error).astimezone(zone)


@contextlib.contextmanager
def operator_time(loop: VirtualLoop, clock: Clock, seed: int) -> Iterator[None]:
    """Let the operator's modules use virtual time, and random numbers that depend on the seed."""
    of_wall_clock = (
        *(base_models, controller, executor, pool_runner, save_requests),
        *(spare_runner, tenant_runner),
    )
    with contextlib.ExitStack() as patches:
        for module in of_wall_clock:
            patches.enter_context(patch.object(module, "datetime", clock))
        patches.enter_context(patch.object(pool_memory, "monotonic", loop.time))
        patches.enter_context(patch.object(informer, "random", random.Random(seed)))
        yield


async def until(holds: Callable[[], bool], seconds: float = math.inf) -> bool:
    """Wait until something holds; return whether it did in time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not holds() and loop.time() < end:  # noqa: ASYNC110 - waiting is free in virtual time
        await asyncio.sleep(0.5)
    return holds()


def run_virtually(loop: VirtualLoop, main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, and cancel what it has left behind."""
    try:
        loop.run_until_complete(main)
    finally:
        left = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
