"""Says how many engines the head needs, for the operator, and stops using surplus ones."""

import asyncio
from collections.abc import Callable

from tinkercloud_protocol.heads.engine_scaling_settings import HOLD_SECONDS, EngineScaling
from tinkercloud_worker.inference.load import LoadHistory
from tinkercloud_worker.inference.server_pool import ServerPool

_TICK_SECONDS = 1.0
"""Interval of observations of the load."""


class LoadScaler:
    """Compares the number of engines with the load. Belongs to one event loop.

    Args:
        pool: the engines.
        scaling: how their number follows the load.
        samples: returns the number of samples in progress, waiting ones included.
    """

    def __init__(
        self, pool: ServerPool, scaling: EngineScaling, samples: Callable[[], int]
    ) -> None:
        self._pool = pool
        self._samples = samples
        self._history = LoadHistory(scaling, len(pool.all))
        self._observing: asyncio.Task[None] | None = None
        self._observed = asyncio.Condition()
        self._turn = 0
        """Number of the newest request; older ones end."""

    async def needed(self, engines: int) -> int:
        """Return how many engines are needed, once that is not the number that exist.

        Fewer are returned when the surplus ones have no request left. They get no other until a
        later call counts them again. Returns the same number after `HOLD_SECONDS`, or when another
        call follows.

        Args:
            engines: how many engines exist.
        """
        if self._observing is None:
            self._observing = asyncio.create_task(self._observe())
        engines = min(engines, len(self._pool.all))
        self._turn += 1
        turn, now = self._turn, asyncio.get_running_loop().time
        end = now() + HOLD_SECONDS
        while turn == self._turn and now() < end:
            needed = self._history.needed(now(), engines)
            self._pool.use(min(needed, engines))
            if needed > engines:
                return needed
            if needed < engines and self._pool.is_left(needed):
                await self._pool.release(needed)
                return needed
            async with self._observed:
                await self._observed.wait()
        return engines

    def close(self) -> None:
        """Stop observing."""
        if self._observing is not None:
            self._observing.cancel()

    async def _observe(self) -> None:
        while True:
            self._history.note(asyncio.get_running_loop().time(), self._samples())
            async with self._observed:
                self._observed.notify_all()
            await asyncio.sleep(_TICK_SECONDS)
