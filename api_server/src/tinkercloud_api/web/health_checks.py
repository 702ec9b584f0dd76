"""Whether the catalog and the checkpoint store respond, for health checks of any number."""

import asyncio

from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_protocol.wire.errors import Unavailable


class HealthChecks:
    """Checks both. Requests that arrive during a check share it: they need no key, and cost I/O."""

    def __init__(self, catalog: Catalog, checkpoints: Checkpoints) -> None:
        """Check nothing yet."""
        self._catalog = catalog
        self._checkpoints = checkpoints
        self._running: asyncio.Task[str | None] | None = None

    async def failure(self) -> str | None:
        """Return why one of them does not respond; None if both do."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._check())
        return await asyncio.shield(self._running)

    async def _check(self) -> str | None:
        try:
            await self._catalog.ping()
            await self._checkpoints.ping()
        except Unavailable as error:
            return error.message
        return None
