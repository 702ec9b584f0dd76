"""Requests that wait for a head or a result, and how they end when the server shuts down.

They wait as long as a long poll, many seconds; shutting down must not take that long.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class ShuttingDown(Exception):
    """The wait was ended because the server is shutting down."""


class LongPolls:
    """Tasks that are waiting for a head or a result. Belongs to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self.is_stopping = False
        """Whether the server is shutting down."""

    def __len__(self) -> int:
        """Return the number of waiting tasks."""
        return len(self._tasks)

    @contextmanager
    def track(self) -> Iterator[None]:
        """Track the current task as waiting for the duration of the context.

        Raises:
            ShuttingDown: the server is shutting down.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a request handler always runs in a task
        if self.is_stopping:
            raise ShuttingDown
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
            task.uncancel()
            raise ShuttingDown from None
        finally:
            self._tasks.discard(task)

    def shut_down(self) -> None:
        """End all waits, current and future ones. This may be called from any thread."""
        self._loop.call_soon_threadsafe(self._shut_down)

    def _shut_down(self) -> None:
        self.is_stopping = True
        for task in self._tasks:
            task.cancel()
