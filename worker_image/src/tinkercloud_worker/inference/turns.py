"""Takes turns between kinds of work that exclude each other, where changing over is expensive.

A server holds one set of base weights at a time, and gives its memory away while a trainer computes
on the same GPUs. Work of one kind runs together; work of another waits until it has ended and the
server has been changed over. The kind of whoever came first goes first, with all work of that kind
that waits by then: so requests of two kinds that come by turns change the server over twice, not
once for each. Work that comes later waits behind other kinds, so no kind starves another.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

_Waiting = tuple[str, "asyncio.Future[None]"]


class Turns:
    """Belongs to one event loop."""

    def __init__(self, change: Callable[[str], Awaitable[None]], kind: str | None) -> None:
        """Make turns.

        Args:
            change: makes the server ready for a kind, whatever it was ready for.
            kind: of work that needs no change to begin with; None if that is not certain.
        """
        self._change = change
        self._kind = kind
        self._running = 0
        self._waiting: deque[_Waiting] = deque()
        self._changing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def of(self, kind: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it for as long as the context lasts.

        Raises:
            Exception: whatever changing over raised.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, turn))
        self._advance()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def reset(self, kind: str | None) -> None:
        """Take it that the server is ready for a kind; None if that is not certain."""
        self._kind = kind

    @property
    def is_idle(self) -> bool:
        """Whether no work runs, whatever waits."""
        return self._running == 0

    def _leave(self) -> None:
        self._running -= 1
        self._advance()

    def _advance(self) -> None:
        while self._waiting and self._changing is None:
            kind, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif kind == self._kind:
                self._admit(kind)
            elif self._running == 0:
                self._changing = asyncio.create_task(self._change_over(kind))
            else:
                return

    def _admit(self, kind: str) -> None:
        """Let all work of a kind begin that waits now."""
        waiting, self._waiting = self._waiting, deque()
        for waiting_kind, turn in waiting:
            if waiting_kind != kind:
                self._waiting.append((waiting_kind, turn))
            elif not turn.done():
                self._running += 1
                turn.set_result(None)

    async def _change_over(self, kind: str) -> None:
        try:
            await self._change(kind)
            self._kind = kind
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits for this turn
            self._kind = None
            for waiting_kind, turn in self._waiting:
                if waiting_kind == kind and not turn.done():
                    turn.set_exception(error)
        finally:
            self._changing = None
            self._advance()
