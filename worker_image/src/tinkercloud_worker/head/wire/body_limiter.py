"""Limits the request bodies that each owner can have in parsing at the same time.

Parsing takes many times the memory of the body. Without a limit, a few large bodies of one owner
would take all memory; with one limit for all owners, they would make all owners wait.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Budget:
    taken: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    """Sizes of waiting bodies, the earliest first."""


class BodyLimiter:
    """Limits the bytes that each owner has in parsing. Belongs to one event loop."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty.

        Args:
            max_bytes: limit for all bodies of one owner; a larger body is parsed alone.
        """
        self._max_bytes = max_bytes
        self._budgets: dict[str, _Budget] = {}

    @asynccontextmanager
    async def reserve(self, owner: str, size: int) -> AsyncIterator[None]:
        """Reserve this many bytes until the context ends; wait until they are free."""
        size = min(size, self._max_bytes)
        budget = self._budgets.setdefault(owner, _Budget())
        if budget.waiting or budget.taken + size > self._max_bytes:
            admitted = asyncio.get_running_loop().create_future()
            budget.waiting.append((size, admitted))
            try:
                await admitted
            except asyncio.CancelledError:
                if not admitted.cancelled():
                    budget.taken -= size
                self._admit(owner, budget)
                raise
        else:
            budget.taken += size
        try:
            yield
        finally:
            budget.taken -= size
            self._admit(owner, budget)

    def _admit(self, owner: str, budget: _Budget) -> None:
        while budget.waiting:
            size, admitted = budget.waiting[0]
            if not admitted.cancelled():
                if budget.taken + size > self._max_bytes:
                    return
                budget.taken += size
                admitted.set_result(None)
            budget.waiting.popleft()
        if not budget.taken:
            self._budgets.pop(owner, None)
