"""Which repeated requests have ended heads, and what follows from that.

A request of the journal may be what killed the head, for example for lack of memory. The next head
repeats it, and would die of it as well, and so would every head after that, with all runs on it.
Each head therefore records in the folder of the journal which repeated request it starts. A request
that was running when a head died runs alone among the repeated ones in the next head, so that no
other is suspected because of it, and a request that has ended two heads is refused.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import structlog

from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_worker.journal.folder import JournalFolder

log = structlog.get_logger(__name__)

_MAX_DEATHS = 2
"""Heads that a request may end while it is repeated."""

_FORGIVE_SECONDS = 1.0
"""How long after the end of a repeated request it is written down that none is running.

Between requests the next one replaces what is written, so that each costs one write, not two. A
request that was suspected is cleared at once.
"""


class EndsHeads(WireError):
    """A request has ended too many heads, and is not run again."""

    status = 400
    category = "user"


class RepeatTurns:
    """Decides which repeated requests of a head run together. Belongs to one event loop."""

    def __init__(self) -> None:
        self.is_stopping = False
        """Whether the head stops in an orderly way: its end is no request's fault."""
        self._changed = asyncio.Condition()
        self._num_running = 0
        self._num_alone = 0
        """Requests that run alone, or wait for that."""

    @asynccontextmanager
    async def turn(self, *, alone: bool) -> AsyncIterator[None]:
        """Run within the context when it is the request's turn.

        Args:
            alone: whether no other repeated request may run meanwhile.
        """
        self._num_alone += alone
        try:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._num_running == 0 if alone else self._num_alone == 0
                )
                self._num_running += 1
            try:
                yield
            finally:
                self._num_running -= 1
        finally:
            self._num_alone -= alone
            async with self._changed:
                self._changed.notify_all()


class Attempts:
    """The attempts to repeat the requests of one run. Belongs to one event loop."""

    def __init__(
        self, folder: JournalFolder, threads: ThreadPoolExecutor, turns: RepeatTurns
    ) -> None:
        """Start without deaths.

        Args:
            folder: of the run's journal.
            threads: where the file is written.
            turns: the repeated requests of the head.
        """
        self._folder = folder
        self._threads = threads
        self._turns = turns
        self.deaths: dict[int, int] = {}
        """How many heads have ended while they repeated a request, by its number."""
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        """Calls `_forgive_later` when no other request has started."""
        self._num_running = 0
        self._is_closed = False
        self._forgiving: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def repeating(self, seq_id: int) -> AsyncIterator[None]:
        """Run a request of an earlier head within the context.

        Args:
            seq_id: its number.

        Raises:
            EndsHeads: it has ended too many heads.
        """
        deaths = self.deaths.get(seq_id, 0)
        if deaths >= _MAX_DEATHS:
            raise EndsHeads(
                f"this request ended {deaths} session heads: each time one was killed while it ran,"
                " for example for lack of memory. It is not run again; send smaller requests"
            )
        async with self._turns.turn(alone=deaths > 0):
            self._num_running += 1
            try:
                await self._write({**self.deaths, seq_id: deaths + 1})
                # If the head is killed, or this is cancelled with its queue, the file stays.
                try:
                    yield
                except Exception:
                    await self._ended(seq_id)
                    raise
                await self._ended(seq_id)
            finally:
                self._num_running -= 1

    async def _ended(self, seq_id: int) -> None:
        if self.deaths.pop(seq_id, None):
            # Before the turn of another suspect, which may end the head at once.
            await self.forgive()
        elif not self._is_closed:
            self._cancel_timer()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_FORGIVE_SECONDS, self._forgive_later)

    def _forgive_later(self) -> None:
        self._forgiving = asyncio.create_task(self._forgive_if_idle())

    async def _forgive_if_idle(self) -> None:
        async with self._writing:
            if not (self._num_running or self._is_closed):
                await self._in_thread(self.deaths)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Leave what is written as it is. Idempotent."""
        self._is_closed = True
        self._cancel_timer()

    async def forgive(self) -> None:
        """Write down that no request is running that may end the head."""
        async with self._writing:
            await self._in_thread(self.deaths)

    async def _write(self, deaths: Mapping[int, int]) -> None:
        async with self._writing:
            if not self._turns.is_stopping:
                await self._in_thread(deaths)

    async def _in_thread(self, deaths: Mapping[int, int]) -> None:
        loop, copied = asyncio.get_running_loop(), dict(deaths)
        try:
            await loop.run_in_executor(self._threads, self._folder.write_deaths, copied)
        except OSError as error:
            # Then one more head may end.
            log.warning(
                "what a head repeats could not be written down",
                model_id=self._folder.run_id,
                reason=str(error),
            )
