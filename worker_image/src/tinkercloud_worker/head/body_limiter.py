"""Room for the bodies that are received and read at the same time, for each owner.

Reading takes many times a body's own memory. Without a bound, a few large bodies of one owner would
take the memory of all; with one bound for everybody, they would make everybody wait.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Room:
    taken: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    """Sizes that wait for room, the earliest first."""


class BodyLimiter:
    """Bounds the bytes of bodies that each owner has read at once. Belongs to one event loop."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty.

        Args:
            max_bytes: of all bodies of one owner; a larger one is read alone.
        """
        self._max_bytes = max_bytes
        self._rooms: dict[str, _Room] = {}

    @asynccontextmanager
    async def room(self, owner: str, size: int) -> AsyncIterator[None]:
        """Take room for a body of that many bytes as long as the context lasts; wait for it."""
        size = min(size, self._max_bytes)
        room = self._rooms.setdefault(owner, _Room())
        if room.waiting or room.taken + size > self._max_bytes:
            admitted = asyncio.get_running_loop().create_future()
            room.waiting.append((size, admitted))
            try:
                await admitted
            except asyncio.CancelledError:
                if not admitted.cancelled():
                    room.taken -= size
                self._admit(owner, room)
                raise
        else:
            room.taken += size
        try:
            yield
        finally:
            room.taken -= size
            self._admit(owner, room)

    def _admit(self, owner: str, room: _Room) -> None:
        while room.waiting:
            size, admitted = room.waiting[0]
            if not admitted.cancelled():
                if room.taken + size > self._max_bytes:
                    return
                room.taken += size
                admitted.set_result(None)
            room.waiting.popleft()
        if not room.taken:
            self._rooms.pop(owner, None)
