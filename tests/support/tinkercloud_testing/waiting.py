"""Waiting for what tests do not control."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 600.0
"""For a machine that does much besides; on a quiet one nothing takes a tenth of it."""


def wait_until(ready: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for something outside our control to become true.

    Raises:
        TimeoutError: It did not in that many seconds.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


async def reached(condition: Callable[[], bool]) -> bool:
    """Wait for something that another task of this event loop does.

    Raises:
        TimeoutError: It did not.
    """
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - what it waits for tells nobody
            await asyncio.sleep(0.001)
    return True
