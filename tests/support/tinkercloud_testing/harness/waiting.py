"""Waiting for conditions that tests do not control."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 600.0
"""Timeout for a busy machine; on an idle one, nothing takes a tenth of it."""


def wait_until(ready: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: The condition was not true in time.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


async def reached(condition: Callable[[], bool]) -> bool:
    """Wait until another task of this event loop makes a condition true.

    Raises:
        TimeoutError: The condition was not true in time.
    """
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the condition sends no notification
            await asyncio.sleep(0.001)
    return True
