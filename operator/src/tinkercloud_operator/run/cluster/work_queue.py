"""A work queue of session names, as in other controllers.

A name is queued at most once and never given to two workers at the same time: one that is added
while a worker holds it is queued again afterwards. Failed names are retried with backoff.
"""

import asyncio

_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 60.0


class WorkQueue:
    """A set of names that workers process. Belongs to one event loop."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[str] = asyncio.Queue()
        self._waiting: set[str] = set()
        """Names in `_ready`."""
        self._taken: set[str] = set()
        self._again: set[str] = set()
        """Names added while taken."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._failures: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, name: str) -> None:
        """Queue a name for the next free worker."""
        self._cancel_timer(name)
        if name in self._taken:
            self._again.add(name)
        elif name not in self._waiting:
            self._waiting.add(name)
            self._ready.put_nowait(name)

    def add_after(self, name: str, seconds: float) -> None:
        """Queue a name after a delay, unless it is added before; the earliest time wins."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(name)
        if timer is not None and timer.when() <= loop.time() + seconds:
            return
        self._cancel_timer(name)
        self._timers[name] = loop.call_later(seconds, self.add, name)

    async def take(self) -> str:
        """Wait for a name; the caller holds it until `done` or `failed`."""
        name = await self._ready.get()
        self._waiting.discard(name)
        self._taken.add(name)
        return name

    def done(self, name: str) -> None:
        """Return a name that was processed."""
        self._failures.pop(name, None)
        self._release(name)

    def failed(self, name: str) -> None:
        """Return a name whose processing failed; it is retried with backoff."""
        failures = self._failures.get(name, 0)
        self._failures[name] = failures + 1
        self._release(name)
        delay = min(_FIRST_RETRY_SECONDS * 2.0**failures, _LAST_RETRY_SECONDS)
        if name not in self._waiting:
            self.add_after(name, delay)

    def _release(self, name: str) -> None:
        self._taken.discard(name)
        if name in self._again:
            self._again.discard(name)
            self.add(name)

    def _cancel_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
