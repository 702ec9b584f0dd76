"""Work without a number, which a model's queue runs between two requests."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_worker.head.order.sequencer import Sequencer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    before: int
    """Number of the first request that runs after it."""
    run: Callable[[], Awaitable[Any]]
    outcome: asyncio.Future[Any]

    async def settle(self) -> None:
        """Run it, unless its caller has gone, and set the result or exception of its outcome."""
        if self.outcome.done():
            return
        outcomes = await asyncio.gather(self.run(), return_exceptions=True)
        result: object = outcomes[0]
        if self.outcome.done():
            return
        if isinstance(result, BaseException):
            self.outcome.set_exception(result)
        else:
            self.outcome.set_result(result)


class WorkBetween:
    """The work of one queue that waits or runs, in order. Belongs to one event loop."""

    def __init__(self) -> None:
        """Start without work."""
        self._waiting: deque[_Work] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, before: int, run: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Add work; return the future of its outcome.

        Args:
            before: number of the first request that runs after it.
            run: the work.
        """
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Work(before, run, outcome))
        return outcome

    async def run_due(self, sequencer: Sequencer) -> None:
        """Run the work that precedes the next request."""
        while self._waiting and self._waiting[0].before <= sequencer.next_seq_id:
            # It stays in the list while it runs, so that `close` ends it.
            await self._waiting[0].settle()
            self._waiting.popleft()

    def close(self, reason: str) -> None:
        """Let the callers of all work fail with this reason."""
        for each in self._waiting:
            if not each.outcome.done():
                each.outcome.set_exception(Unavailable(f"{reason}; send the request again"))
