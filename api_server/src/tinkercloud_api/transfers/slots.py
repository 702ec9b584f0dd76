"""Limits the concurrent downloads of each owner, so that they leave room for those of others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tinkercloud_protocol.wire.errors import Overloaded

_WAITING_PER_SLOT = 16
"""Limit of downloads that wait, for each that may run."""
_WAIT_SECONDS = 45.0
"""How long a download may wait: less than the 60 s that the SDK waits for a response."""


@dataclass(slots=True)
class _Owner:
    free: asyncio.Semaphore
    users: int = field(default=0)
    """Downloads that run or wait."""


class DownloadSlots:
    """Slots of downloads, the same number for each owner."""

    def __init__(self, per_owner: int, wait_seconds: float = _WAIT_SECONDS) -> None:
        self._per_owner = per_owner
        self._wait_seconds = wait_seconds
        self._owners: dict[str, _Owner] = {}

    @asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[None]:
        """Hold a slot of an owner for the duration of the context, after waiting for it.

        Raises:
            Overloaded: too many downloads of this owner run or wait.
        """
        entry = self._owners.setdefault(owner, _Owner(asyncio.Semaphore(self._per_owner)))
        if entry.users >= self._per_owner * (1 + _WAITING_PER_SLOT):
            raise self._overloaded(owner)
        entry.users += 1
        try:
            try:
                async with asyncio.timeout(self._wait_seconds):
                    await entry.free.acquire()
            except TimeoutError:
                raise self._overloaded(owner) from None
            try:
                yield
            finally:
                entry.free.release()
        finally:
            entry.users -= 1
            if not entry.users:
                self._owners.pop(owner, None)

    def _overloaded(self, owner: str) -> Overloaded:
        return Overloaded(
            f"owner {owner!r} already downloads {self._per_owner} files, the limit"
            " (downloads.max_concurrent_per_owner); wait for one to finish and try again"
        )
