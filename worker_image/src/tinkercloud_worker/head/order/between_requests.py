"""Work without a number, which a model's queue runs between two requests."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class WorkBetween:
    """Work that runs between requests."""

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
