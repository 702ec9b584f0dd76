"""Those who wait for a result, and how to let them go when the server stops.

A long poll is held for many seconds; a server that is told to stop must not take that long.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class ShuttingDown(Exception):
    """The wait was ended because the server is stopping."""


class LongPolls:
    """The tasks that wait. Belongs to one event loop; `dismiss` may be called from anywhere."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_stopping = False

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._tasks)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the current task among those who wait, for as long as the context lasts.

        Raises:
            ShuttingDown: the server is stopping.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a request handler always runs in a task
        if self._is_stopping:
            raise ShuttingDown
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
            task.uncancel()
            raise ShuttingDown from None
        finally:
            self._tasks.discard(task)

    def dismiss(self) -> None:
        """Let everyone go, now and from now on."""
        self._loop.call_soon_threadsafe(self._dismiss)

    def _dismiss(self) -> None:
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
