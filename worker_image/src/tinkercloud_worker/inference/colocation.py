"""A trainer that shares its GPUs with inference servers, and has them to itself while it computes.

The servers take their memory back when a request for them comes, not before: a step that follows a
step finds the GPUs as it left them.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from tinkercloud_worker.engine.thread import Between, EngineThread

T = TypeVar("T")
Turn = Callable[[], AbstractAsyncContextManager[None]]


class ColocatedThread(EngineThread):
    """An engine thread whose jobs wait for the servers to give their memory away."""

    def __init__(self, turn: Turn, on_crash: Callable[[BaseException], None]) -> None:
        """Make a thread.

        Args:
            turn: a context in which the GPUs are the trainer's.
            on_crash: see `EngineThread`.
        """
        super().__init__(on_crash)
        self._turn = turn

    async def run(self, job: Callable[[Between], T]) -> T:
        """See `EngineThread.run`."""
        async with self._turn():
            return await super().run(job)
