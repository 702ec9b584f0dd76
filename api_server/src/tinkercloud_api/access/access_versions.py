"""The version of access rights, read before each request.

Every change of rights, by any server or on the command line, increases the version in the catalog.
A server therefore uses what it remembers of keys, owners and projects only as long as the version
is the same. All requests that arrive during one read share the next one, so that at most one read
runs at a time, however many requests there are.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from tinkercloud_protocol.wire.errors import Unavailable

log = structlog.get_logger(__name__)

_READ_SECONDS = 2.0
"""How long one read may take. Requests wait for it."""


class AccessVersions:
    """Reads the version. Belongs to one event loop."""

    def __init__(
        self,
        read: Callable[[], Awaitable[int]],
        lenience_seconds: float,
        read_at_once: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Use a source of versions.

        Args:
            read: reads the version from the catalog.
            lenience_seconds: how long the last version counts while the catalog does not respond.
            read_at_once: reads it without waiting; returns None if that is not possible.
        """
        self._read = read
        self._read_at_once = read_at_once
        self._lenience = lenience_seconds
        self._last = 0
        self._read_at: float | None = None
        """When the last successful read started, on the monotonic clock."""
        self._running: asyncio.Task[int] | None = None
        self._next: asyncio.Task[int] | None = None

    async def current(self) -> int:
        """Return the version, as it is now or later.

        Raises:
            Unavailable: the catalog has not responded for longer than the lenience.
        """
        version = self._read_at_once()
        if version is not None:
            self._last, self._read_at = version, time.monotonic()
            return version
        if self._next is None:
            self._next = asyncio.create_task(self._read_after(self._running))
        return await asyncio.shield(self._next)

    async def _read_after(self, previous: "asyncio.Task[int] | None") -> int:
        if previous is not None:
            await asyncio.wait({previous})
        # Requests that arrive from now on need a later read.
        self._running, self._next = self._next, None
        moment = time.monotonic()
        try:
            async with asyncio.timeout(_READ_SECONDS):
                self._last = await self._read()
        except (Unavailable, TimeoutError):
            if self._read_at is None or moment - self._read_at > self._lenience:
                raise Unavailable("the catalog does not respond; send the request again") from None
            log.warning("the version of access rights could not be read; using the last one")
        else:
            self._read_at = moment
        return self._last
