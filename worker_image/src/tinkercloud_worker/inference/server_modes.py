"""Group mutual exclusion: work in one mode of a server runs together, other modes wait.

A server holds one set of base weights at a time, and gives its memory away while a trainer computes
on the same GPUs. Each of these is a mode, and switching is expensive. Work in one mode runs
concurrently; work in another waits until it has ended and the server has been switched. The mode
of the oldest waiting work goes first, together with all work that waits for that mode by then: so
requests that alternate between two modes switch the server twice, not once each. Work that arrives
later waits behind the other modes, so no mode starves another.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

_Waiting = tuple[str, "asyncio.Future[None]"]


class ModeSwitch:
    """Which mode one server is in, and who waits for which. Belongs to one event loop."""

    def __init__(self, switch: Callable[[str], Awaitable[None]], mode: str | None) -> None:
        """Make a switch.

        Args:
            switch: puts the server into a mode, whatever mode it was in.
            mode: the server is in; None if that is not certain.
        """
        self._switch = switch
        self._mode = mode
        self._running = 0
        self._waiting: deque[_Waiting] = deque()
        self._switching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def use(self, mode: str) -> AsyncIterator[None]:
        """Wait until the server is in a mode, and keep it there until the context ends.

        Raises:
            Exception: whatever switching raised.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((mode, turn))
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

    def reset(self, mode: str | None) -> None:
        """Assume that the server is in a mode; None if that is not certain."""
        self._mode = mode

    @property
    def is_idle(self) -> bool:
        """Whether no work runs, whatever waits."""
        return self._running == 0

    def _leave(self) -> None:
        self._running -= 1
        self._advance()

    def _advance(self) -> None:
        while self._waiting and self._switching is None:
            mode, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif mode == self._mode:
                self._admit(mode)
            elif self._running == 0:
                self._switching = asyncio.create_task(self._switch_to(mode))
            else:
                return

    def _admit(self, mode: str) -> None:
        """Let all work begin that waits for a mode now."""
        waiting, self._waiting = self._waiting, deque()
        for waiting_mode, turn in waiting:
            if waiting_mode != mode:
                self._waiting.append((waiting_mode, turn))
            elif not turn.done():
                self._running += 1
                turn.set_result(None)

    async def _switch_to(self, mode: str) -> None:
        try:
            await self._switch(mode)
            self._mode = mode
        except Exception as error:  # noqa: BLE001 - raised again by all work that waits for this mode
            self._mode = None
            for waiting_mode, turn in self._waiting:
                if waiting_mode == mode and not turn.done():
                    turn.set_exception(error)
        finally:
            self._switching = None
            self._advance()
