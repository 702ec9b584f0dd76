"""Models that leave the trainer: copies begin between requests and end while others run."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_worker.engine.trainer import Publication, WeightsCopy

T = TypeVar("T")


async def completed(
    begin: Callable[[], Awaitable[Callable[[], T]]],
    complete: Callable[[Callable[[], T]], Awaitable[T]],
) -> T:
    """Return a copy; if it is lost with the node that made it, make it once more.

    The second copy is of the state that the surviving nodes have. It equals the first one if no
    request of the model runs meanwhile; otherwise the caller must accept any state between two.

    Args:
        begin: begins the copy, as `Trainer.begin_export` does.
        complete: calls what `begin` returns, on another thread.

    Raises:
        Unavailable: the second copy was lost too.
        StateLost: no surviving node has the model.
    """
    try:
        return await complete(await begin())
    except Unavailable:
        return await complete(await begin())


async def stored(store: Callable[[], Publication]) -> Publication:
    """Store published weights where samplers read them; remove them if the caller is cancelled."""
    storing = asyncio.create_task(asyncio.to_thread(store))
    # The callable may hold the weights in memory.
    del store
    try:
        return await asyncio.shield(storing)
    except asyncio.CancelledError:
        storing.add_done_callback(_remove)
        raise


def _remove(storing: asyncio.Task[Publication]) -> None:
    if not storing.cancelled() and storing.exception() is None:
        weights = storing.result()
        if not isinstance(weights, WeightsCopy):
            weights.remove()
