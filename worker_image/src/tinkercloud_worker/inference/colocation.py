"""Time-shares GPUs between a trainer and colocated inference servers.

The trainer has the GPUs to itself while it computes. The servers resume their memory only when a
request arrives, so nothing is switched between consecutive steps. Before a server gets the GPUs,
torch's cached GPU memory is released. Lightweight jobs, such as saving, do not wait for the GPUs;
memory that they leave in torch's cache is released too.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

from tinkercloud_worker.engine.turns.engine_thread import Batcher, EngineThread, ThreadStopped
from tinkercloud_worker.engine.turns.fair_queue import Share
from tinkercloud_worker.engine.turns.usage_counts import UsageMeter

ItemT = TypeVar("ItemT")
T = TypeVar("T")
Turn = Callable[[], AbstractAsyncContextManager[None]]


class ColocatedThread(EngineThread):
    """An engine thread whose jobs wait until the servers have released their memory."""

    def __init__(
        self,
        turn: Turn,
        release: Callable[[], None],
        on_crash: Callable[[BaseException], None],
        *,
        weights: dict[str, int] | None = None,
        usage: UsageMeter | None = None,
    ) -> None:
        """Create a thread.

        Args:
            turn: context in which the trainer owns the GPUs; several may be open at once.
            release: frees the GPU memory that the trainer caches; called on the thread.
            on_crash: see `EngineThread`.
            weights: see `EngineThread`.
            usage: see `EngineThread`.
        """
        super().__init__(on_crash, weights=weights, usage=usage)
        self._turn = turn
        self._release = release
        self._holders = 0
        """Number of jobs that own the GPUs."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """Unfinished jobs, even if their callers were cancelled."""

    async def run_batched(
        self, batcher: Batcher[ItemT, T], item: ItemT, share: Share | None = None
    ) -> T:
        """See `EngineThread.run_batched`."""
        has_turn = asyncio.Event()
        holding = self._start_job(self._with_turn(batcher, item, share, has_turn))
        try:
            return await asyncio.shield(holding)
        except asyncio.CancelledError:
            # Cancelling the caller does not end the job, which owns the GPUs until it ends.
            if not has_turn.is_set():
                holding.cancel()
            raise

    async def run_lightweight(self, job: Callable[[], T]) -> T:
        """See `EngineThread.run_lightweight`."""
        return await asyncio.shield(self._start_job(self._without_turn(job)))

    async def _without_turn(self, job: Callable[[], T]) -> T:
        try:
            return await super().run_lightweight(job)
        finally:
            # A job that owns the GPUs releases memory itself when it ends.
            if not self._holders:
                await self._release_memory()

    async def _with_turn(
        self,
        batcher: Batcher[ItemT, T],
        item: ItemT,
        share: Share | None,
        has_turn: asyncio.Event,
    ) -> T:
        async with self._turn():
            has_turn.set()
            self._holders += 1
            try:
                return await super().run_batched(batcher, item, share)
            finally:
                try:
                    if self._holders == 1:
                        await self._release_memory()
                finally:
                    self._holders -= 1

    async def _release_memory(self) -> None:
        # The thread may have stopped: tasks are cancelled at the end of the process.
        with suppress(ThreadStopped):
            await super().run_lightweight(self._release)

    def _start_job(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # The caller may be gone: mark the exception as retrieved.
            task.exception()
