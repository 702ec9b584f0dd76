"""A trainer that shares its GPUs with inference servers, and has them to itself while it computes.

The servers resume their memory when a request for them arrives, not before: between consecutive
steps nothing is switched. GPU memory that torch caches is released before a server has its turn.
Jobs that need no GPU memory, such as saving, wait for no turn; what they leave in torch's cache is
released as well.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

from tinkercloud_worker.engine.thread import Batcher, EngineThread, ThreadStopped

ItemT = TypeVar("ItemT")
T = TypeVar("T")
Turn = Callable[[], AbstractAsyncContextManager[None]]


class ColocatedThread(EngineThread):
    """An engine thread whose jobs wait for the servers to release their memory."""

    def __init__(
        self, turn: Turn, release: Callable[[], None], on_crash: Callable[[BaseException], None]
    ) -> None:
        """Make a thread.

        Args:
            turn: a context in which the GPUs are the trainer's; several may be open at once.
            release: frees the GPU memory that the trainer caches; called on the thread.
            on_crash: see `EngineThread`.
        """
        super().__init__(on_crash)
        self._turn = turn
        self._release = release
        self._holders = 0
        """Jobs that have the turn."""
        self._begun: set[asyncio.Task[Any]] = set()
        """Jobs that have not ended, whether or not anybody still waits for them."""

    async def run_batched(self, group: Batcher[ItemT, T], item: ItemT) -> T:
        """See `EngineThread.run_batched`."""
        has_turn = asyncio.Event()
        holding = self._begin(self._with_turn(group, item, has_turn))
        try:
            return await asyncio.shield(holding)
        except asyncio.CancelledError:
            # To cancel the caller does not end the job: the GPUs are the trainer's until it ends.
            if not has_turn.is_set():
                holding.cancel()
            raise

    async def run_lightweight(self, job: Callable[[], T]) -> T:
        """See `EngineThread.run_lightweight`."""
        return await asyncio.shield(self._begin(self._without_turn(job)))

    async def _without_turn(self, job: Callable[[], T]) -> T:
        try:
            return await super().run_lightweight(job)
        finally:
            # If a job holds the GPUs, it releases memory itself when it ends.
            if not self._holders:
                await self._release_memory()

    async def _with_turn(self, group: Batcher[ItemT, T], item: ItemT, has_turn: asyncio.Event) -> T:
        async with self._turn():
            has_turn.set()
            self._holders += 1
            try:
                return await super().run_batched(group, item)
            finally:
                try:
                    if self._holders == 1:
                        await self._release_memory()
                finally:
                    self._holders -= 1

    async def _release_memory(self) -> None:
        # Cancellation at the end of the process comes here too, when the thread has stopped.
        with suppress(ThreadStopped):
            await super().run_lightweight(self._release)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._begun.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._begun.discard(task)
        if not task.cancelled():
            # Nobody may await it any more: its exception counts as retrieved.
            task.exception()
