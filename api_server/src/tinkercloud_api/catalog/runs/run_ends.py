"""Notifies all servers that share a catalog of deleted runs.

PostgreSQL sends messages. SQLite has none, but each connection can ask, without reading the file,
whether another one has changed it: servers with runs that wait ask once a second.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from tinkercloud_api.catalog.schema.tables import TrainingRun

log = structlog.get_logger(__name__)

_CHANNEL = "tinkercloud_runs_ended"
_RETRY_SECONDS = 5.0
_CHECK_SECONDS = 30.0
"""Interval between two checks that the PostgreSQL server still responds."""
_RESPONSE_SECONDS = 10.0
"""How long it may take for that. A connection may be lost without either end having noticed."""
_WATCH_SECONDS = 1.0


async def announce(db: AsyncSession) -> None:
    """Tell all servers that runs were deleted, once the transaction has been committed.

    SQLite has no such messages: there the others see that the file has changed.
    """
    if db.get_bind().dialect.name == "postgresql":
        await db.execute(select(func.pg_notify(_CHANNEL, "")))


async def follow(engine: AsyncEngine, on_end: Callable[[], object], waits: asyncio.Event) -> None:
    """Call `on_end` whenever a server has deleted runs, until cancelled.

    It is also called when the connection has been opened, again or for the first time: messages
    may have been missed.

    Args:
        engine: the catalog's database.
        on_end: called without arguments.
        waits: set while a run waits for others to end. SQLite is asked only then.
    """
    while True:
        try:
            if engine.dialect.name == "postgresql":
                await _listen(engine, on_end)
            else:
                await _watch(engine, on_end, waits)
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


async def _watch(engine: AsyncEngine, on_end: Callable[[], object], waits: asyncio.Event) -> None:
    """Call `on_end` when runs have been deleted since the last check of an SQLite file.

    Most changes of the file are not ends of runs, whose number and last time show whether any is.
    """
    ends = select(func.count(TrainingRun.deleted_at), func.max(TrainingRun.deleted_at))
    known: tuple[object, object] = (None, None)
    async with engine.connect() as connection:
        while True:
            await waits.wait()
            version = await connection.scalar(text("PRAGMA data_version"))
            if version != known[0]:
                found = (version, tuple((await connection.execute(ends)).one()))
                has_ended, known = found[1] != known[1], found
                if has_ended:
                    on_end()
            # Without this, an open transaction would show the file as it was.
            await connection.rollback()
            await asyncio.sleep(_WATCH_SECONDS)
