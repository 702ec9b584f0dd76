"""A trainer that shares its GPUs with inference servers, and has them to itself while it computes.

The servers take their memory back when a request for them comes, not before: a step that follows a
step finds the GPUs as it left them. What torch keeps of a GPU's memory between steps is given up
before anybody else has a turn. What needs no memory there, as saving, has no turn to wait for; what
it leaves behind all the same, or frees, is given up as well.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

from tinkercloud_worker.engine.thread import EngineThread, Group, ThreadStopped

ItemT = TypeVar("ItemT")
T = TypeVar("T")
Turn = Callable[[], AbstractAsyncContextManager[None]]


class ColocatedThread(EngineThread):
    """An engine thread whose jobs wait for the servers to give their memory away."""

    def __init__(
        self, turn: Turn, release: Callable[[], None], on_crash: Callable[[BaseException], None]
    ) -> None:
        """Make a thread.

        Args:
            turn: a context in which the GPUs are the trainer's; it may be entered several times.
            release: gives up what the trainer keeps of their memory; called on the thread.
            on_crash: see `EngineThread`.
        """
        super().__init__(on_crash)
        self._turn = turn
        self._release = release
        self._holders = 0
        """Jobs that have the turn."""
        self._begun: set[asyncio.Task[Any]] = set()
        """What is not over, whoever still waits for it."""

    async def run_with_others(self, group: Group[ItemT, T], item: ItemT) -> T:
        """See `EngineThread.run_with_others`."""
        has_turn = asyncio.Event()
        holding = self._begin(self._with_turn(group, item, has_turn))
        try:
            return await asyncio.shield(holding)
        except asyncio.CancelledError:
            # Whoever gives a job up does not end it: the GPUs are the trainer's until it has.
            if not has_turn.is_set():
                holding.cancel()
            raise

    async def run_beside(self, job: Callable[[], T]) -> T:
        """See `EngineThread.run_beside`."""
        return await asyncio.shield(self._begin(self._without_turn(job)))

    async def _without_turn(self, job: Callable[[], T]) -> T:
        try:
            return await super().run_beside(job)
        finally:
            # Who has the turn does so before it ends.
            if not self._holders:
                await self._give_up_memory()

    async def _with_turn(self, group: Group[ItemT, T], item: ItemT, has_turn: asyncio.Event) -> T:
        async with self._turn():
            has_turn.set()
            self._holders += 1
            try:
                return await super().run_with_others(group, item)
            finally:
                try:
                    if self._holders == 1:
                        await self._give_up_memory()
                finally:
                    self._holders -= 1

    async def _give_up_memory(self) -> None:
        # Who is cancelled as the process ends comes by here too, when nothing runs jobs any more.
        with suppress(ThreadStopped):
            await super().run_beside(self._release)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._begun.add(task)
        task.add_done_callback(self._settle)
        return task

    def _settle(self, task: asyncio.Task[Any]) -> None:
        self._begun.discard(task)
        if not task.cancelled():
            # Whoever has given up does not look.
            task.exception()
