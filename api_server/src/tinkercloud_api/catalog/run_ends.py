"""Notifies all servers that share a catalog on PostgreSQL of deleted runs."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

log = structlog.get_logger(__name__)

_CHANNEL = "tinkercloud_runs_ended"
_RETRY_SECONDS = 5.0
_CHECK_SECONDS = 30.0
"""Interval between two checks that the server still responds."""
_RESPONSE_SECONDS = 10.0
"""How long it may take for that. A connection may be lost without either end having noticed."""


async def announce(db: AsyncSession) -> None:
    """Tell all servers that runs were deleted, once the transaction has been committed.

    SQLite has no such messages; there, a server knows of the runs that it deletes itself.
    """
    if db.get_bind().dialect.name == "postgresql":
        await db.execute(select(func.pg_notify(_CHANNEL, "")))


async def follow(engine: AsyncEngine, on_end: Callable[[], object]) -> None:
    """Call `on_end` whenever a server has deleted runs, until cancelled; not on SQLite.

    It is also called when the connection has been opened, again or for the first time: messages
    may have been missed.
    """
    while engine.dialect.name == "postgresql":
        try:
            await _listen(engine, on_end)
        except Exception:
            # Of many types: the driver's own methods raise its own exceptions.
            log.warning("cannot follow the ends of runs; will retry", exc_info=True)
        await asyncio.sleep(_RETRY_SECONDS)


async def _listen(engine: AsyncEngine, on_end: Callable[[], object]) -> None:
    """Call `on_end` for each message until the connection is lost.

    Raises:
        Exception: the server does not respond, or rejects the connection.
    """
    async with engine.connect() as connection:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        lost = asyncio.Event()
        driver.add_termination_listener(lambda _: lost.set())
        try:
            await driver.add_listener(_CHANNEL, lambda *_: on_end())
            on_end()
            while not await _is_set(lost, _CHECK_SECONDS):
                await driver.execute("SELECT 1", timeout=_RESPONSE_SECONDS)
        finally:
            # It must not return to the pool, where it would continue to listen.
            await connection.invalidate()


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    """Return whether an event happens within some time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
