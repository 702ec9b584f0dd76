"""Reads chat requests and renders their prompts: in threads of their own, in turns of owners.

A request of some megabytes takes seconds of a thread and many times its size of memory, whether or
not it is refused in the end. So one owner has one job at a time, and bodies of a bounded size; its
other requests wait. Another owner's request gets the next free thread.
"""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import copy_context
from functools import partial
from types import FrameType
from typing import TypeVar

from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.head.wire.body_limiter import BodyLimiter

T = TypeVar("T")

_THREADS = 2
MAX_STEPS = 1 << 25
"""Function calls and returns of one job: some seconds."""


class PromptWork:
    """The bodies and threads of chat requests. Belongs to one event loop."""

    def __init__(self, threads: int = _THREADS, max_steps: int = MAX_STEPS) -> None:
        """Start without work.

        Args:
            threads: how many jobs run at a time, of as many owners.
            max_steps: function calls and returns after which a job fails.
        """
        self._bodies = BodyLimiter(routes.MAX_CHAT_BODY_BYTES)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prompts")
        self._num_free = threads
        self._max_steps = max_steps
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting jobs of each owner; the owner whose turn is next is first."""
        self._running: set[str] = set()

    def room(self, owner: str, num_bytes: int) -> AbstractAsyncContextManager[None]:
        """Wait until an owner has room for a body, and keep it for the context."""
        return self._bodies.reserve(owner, num_bytes)

    async def run(self, owner: str, job: Callable[[], T]) -> T:
        """Run a job in a thread when it is the owner's turn.

        If the caller is cancelled, the job is not started, or is stopped at its next function call;
        the owner's next job starts only then.

        Raises:
            InvalidRequest: the job has too many steps, as a template's with nested loops.
        """
        stop = threading.Event()

        def stoppable() -> T:
            with _watched(stop, self._max_steps):
                return job()

        async with self._turn(owner):
            # With the context, log lines of the job name its request.
            job_in_context = partial(copy_context().run, stoppable)
            running = asyncio.get_running_loop().run_in_executor(self._threads, job_in_context)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                stop.set()
                await asyncio.wait([running])
                raise

    @asynccontextmanager
    async def _turn(self, owner: str) -> AsyncIterator[None]:
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(admitted)
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():
                self._forget(owner, admitted)
            else:
                self._leave(owner)
            raise
        try:
            yield
        finally:
            self._leave(owner)

    def _admit(self) -> None:
        for owner in list(self._waiting):
            if not self._num_free:
                return
            if owner in self._running:
                continue
            line = self._waiting.pop(owner)
            # Callers may be cancelled, but not have left the line yet.
            while line and line[0].done():
                del line[0]
            if not line:
                continue
            self._num_free -= 1
            self._running.add(owner)
            line.popleft().set_result(None)
            if line:
                # Its next job comes after those of all owners that wait now.
                self._waiting[owner] = line

    def _forget(self, owner: str, admitted: "asyncio.Future[None]") -> None:
        line = self._waiting.get(owner)
        if line is not None and admitted in line:
            line.remove(admitted)
            if not line:
                del self._waiting[owner]

    def _leave(self, owner: str) -> None:
        self._num_free += 1
        self._running.discard(owner)
        self._admit()


class _Stopped(Exception):
    """The caller of a job was cancelled."""


@contextmanager
def _watched(stop: threading.Event, max_steps: int) -> Iterator[None]:
    """Raise from the next function call of this thread once `stop` is set, or after many steps.

    Templates have no place of their own to look at a flag: their loops are compiled code.
    """
    left = max_steps

    def watch(_frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal left
        left -= 1
        if stop.is_set():
            raise _Stopped
        if left < 0:
            raise InvalidRequest(
                "the request body: takes too many steps to turn it into tokens; send fewer or"
                " shorter messages or prompts"
            )

    earlier = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(earlier)
