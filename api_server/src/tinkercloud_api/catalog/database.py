"""The catalog's connection and schema."""

from pathlib import Path

import alembic.command
import alembic.config
from sqlalchemy import URL, Connection, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as NoConnectionFreeError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

_MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = int.from_bytes(b"tinker")
"""Number of PostgreSQL's advisory lock. Any will do that nobody else takes in this database."""
_CONNECT_SECONDS = 10.0
_STATEMENT_SECONDS = 30.0
"""A server that hangs, or a network that swallows packets, is taken for away after this time."""

WRONG_STATEMENT = (IntegrityError, ProgrammingError, DataError)
"""A database has answered, and refuses."""
NO_ANSWER = (DBAPIError, NoConnectionFreeError, OSError)
"""Otherwise it is away or gave up, and the same statement may succeed later."""


class CatalogUnreachableError(Exception):
    """The catalog's database can't be opened; the message says which and why."""


def open_database(url: str) -> AsyncEngine:
    """Return an engine for a database URL; the folder of an SQLite file is made if needed.

    Raises:
        CatalogUnreachableError: it can't be made.
    """
    return _open(make_url(url), _STATEMENT_SECONDS)


def _open(url: URL, statement_seconds: float | None) -> AsyncEngine:
    is_postgresql = url.get_backend_name() == "postgresql"
    bounds = {"timeout": _CONNECT_SECONDS, "command_timeout": statement_seconds}
    engine = create_async_engine(
        url,
        pool_pre_ping=is_postgresql,
        # Parameters are users' words, and hashes of keys: nothing for a log.
        hide_parameters=True,
        connect_args=bounds if is_postgresql else {},
    )
    if engine.dialect.name == "sqlite":
        if engine.url.database:
            _make_folder(Path(engine.url.database).parent)
        event.listen(engine.sync_engine, "connect", _configure_sqlite)
    return engine


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CatalogUnreachableError(
            f"the catalog's folder {folder} can't be made ({error.strerror}): it is that of"
            " database_url or, without one, state_dir"
        ) from None


def _configure_sqlite(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    # Readers and one writer at a time, each waiting for the other rather than failing.
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA busy_timeout=10000")
    # A key that was shown and a checkpoint that was acknowledged survive a loss of power.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def migration_config() -> alembic.config.Config:
    """Return Alembic's configuration."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.set_main_option("path_separator", "os")
    return config


async def migrate(engine: AsyncEngine) -> None:
    """Bring the schema up to date, however long it takes. Replicas wait for each other.

    Raises:
        CatalogUnreachableError: the database does not answer.
    """

    def upgrade(connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            lock = text("SELECT pg_advisory_xact_lock(:number)")
            connection.execute(lock, {"number": _MIGRATION_LOCK})
        config = migration_config()
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")

    patient = _open(engine.url, statement_seconds=None)
    try:
        async with patient.begin() as connection:
            await connection.run_sync(upgrade)
    except WRONG_STATEMENT:
        raise
    except NO_ANSWER as error:
        where = engine.url.render_as_string(hide_password=True)
        reason = str(error).splitlines()[0]
        raise CatalogUnreachableError(
            f"database_url: the catalog at {where} can't be opened ({reason})"
        ) from error
    finally:
        await patient.dispose()
