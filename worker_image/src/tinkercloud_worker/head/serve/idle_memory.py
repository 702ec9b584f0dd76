"""Frees memory of an idle head that would only make later work faster."""

import asyncio

from tinkercloud_protocol.heads.launch import HeadStatus
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_worker.device.memory import return_free_memory
from tinkercloud_worker.head.backend import Backend

_IDLE_SECONDS = 60.0


class IdleMemory:
    """Frees caches once in each idle period. Belongs to one event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._is_released = False

    async def check(self, status: HeadStatus) -> None:
        """Free caches if the head has been idle for long enough."""
        if status.pending_requests or status.idle_seconds < _IDLE_SECONDS:
            self._is_released = False
        elif not self._is_released:
            self._is_released = True
            await self.release()

    async def release(self) -> None:
        """Free the caches of the sampler, and unused memory of the process."""
        try:
            await self._backend.thread.run_lightweight(self._backend.sampler.release_caches)
        except Unavailable:
            # The engine thread has stopped, and the head is about to end.
            return
        await asyncio.to_thread(return_free_memory)
