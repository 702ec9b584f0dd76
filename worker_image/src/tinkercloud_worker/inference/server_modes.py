"""Group mutual exclusion: work in one mode of a server runs concurrently, other modes wait.

A server has one set of base weights at a time, and releases its memory while a trainer computes on
the same GPUs. Each of these states is a mode, and switching is expensive. Work in one mode runs
concurrently; work in another mode waits until it has ended and the server was switched. The mode of
the oldest waiting work is next, with all work that waits for that mode by then: alternating
requests for two modes cause two switches, not one each. Work that arrives later waits behind the
other modes, so no mode starves another.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

_Waiter = tuple[str, "asyncio.Future[None]"]


class ModeSwitch:
    """The mode of one server, and the work that waits for modes. Belongs to one event loop."""

    def __init__(self, switch: Callable[[str], Awaitable[None]], mode: str | None) -> None:
        """Create a switch.

        Args:
            switch: puts the server into a mode, from any mode.
            mode: the current mode; None if it is unknown.
        """
        self._switch = switch
        self._mode = mode
        self._running = 0
        self._waiting: deque[_Waiter] = deque()
        self._switching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def use(self, mode: str) -> AsyncIterator[None]:
        """Wait until the server is in a mode, and keep it there until the context ends.

        Raises:
            Exception: any error of switching.
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
        """Set the assumed mode of the server; None if it is unknown."""
        self._mode = mode

    @property
    def is_idle(self) -> bool:
        """Whether no work is running; work may be waiting."""
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
        """Start all work that is waiting for a mode now."""
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
        except Exception as error:  # noqa: BLE001 - raised in all work that waits for this mode
            self._mode = None
            for waiting_mode, turn in self._waiting:
                if waiting_mode == mode and not turn.done():
                    turn.set_exception(error)
        finally:
            self._switching = None
            self._advance()
