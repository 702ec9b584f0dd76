"""The catalog's connection and schema."""

from pathlib import Path

import alembic.command
import alembic.config
from sqlalchemy import Connection, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

_MIGRATIONS = Path(__file__).parent / "migrations"


def open_database(url: str) -> AsyncEngine:
    """Return an engine for a database URL; the folder of an SQLite file is made if needed."""
    engine = create_async_engine(url, pool_pre_ping=not url.startswith("sqlite"))
    if engine.dialect.name == "sqlite":
        if engine.url.database:
            Path(engine.url.database).parent.mkdir(parents=True, exist_ok=True)
        event.listen(engine.sync_engine, "connect", _configure_sqlite)
    return engine


def _configure_sqlite(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    # Readers and one writer at a time, each waiting for the other rather than failing.
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def migration_config() -> alembic.config.Config:
    """Return Alembic's configuration."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.set_main_option("path_separator", "os")
    return config


async def migrate(engine: AsyncEngine) -> None:
    """Bring the schema up to date."""

    def upgrade(connection: Connection) -> None:
        config = migration_config()
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")

    async with engine.begin() as connection:
        await connection.run_sync(upgrade)
