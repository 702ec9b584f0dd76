"""Connection to the catalog database, and its schema migrations."""

import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import alembic.command
import alembic.config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as NoConnectionFreeError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from tinkercloud_protocol.heads.releases import this_release

_MIGRATIONS = Path(__file__).parents[1] / "migrations"
_MIGRATION_LOCK = int.from_bytes(b"tinker")
"""Number of the PostgreSQL advisory lock for migrations, unique in this database."""
_CONNECT_SECONDS = 10.0
_STATEMENT_SECONDS = 30.0
"""Timeout after which a hanging server or network counts as unreachable."""

WRONG_STATEMENT = (IntegrityError, ProgrammingError, DataError)
"""Errors in a statement, reported by a reachable database."""
NO_ANSWER = (DBAPIError, NoConnectionFreeError, OSError)
"""Errors of an unreachable or overloaded database; the same statement may succeed later."""

_DAMAGE = ("database disk image is malformed", "file is not a database")
"""SQLite's messages for a damaged file."""
_REBUILD = (
    "move the file and those with its name and -wal or -shm away, and run `tinkercloud catalog"
    " rebuild`"
)
_REBUILD_ELSEWHERE = "use an empty database, and run `tinkercloud catalog rebuild`"
_REPAIR = f"; restore a backup, or {_REBUILD}"
_BEFORE_RELEASES = "00"
"""How the revisions of catalogs begin that trees before release 0.1.0 made."""


class CatalogUnreachableError(Exception):
    """The catalog database cannot be opened; the message says which and why."""


def open_database(url: str) -> AsyncEngine:
    """Return an engine for a database URL; create the folder of an SQLite file if needed.

    Raises:
        CatalogUnreachableError: the folder cannot be created.
    """
    return _open(make_url(url), _STATEMENT_SECONDS)


def _open(url: URL, statement_seconds: float | None) -> AsyncEngine:
    is_postgresql = url.get_backend_name() == "postgresql"
    bounds = {"timeout": _CONNECT_SECONDS, "command_timeout": statement_seconds}
    engine = create_async_engine(
        url,
        pool_pre_ping=is_postgresql,
        # Parameters include user input and hashes of keys, which must not be logged.
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
            f"cannot create the catalog folder {folder} ({error.strerror}); it is set by"
            " database_url or, if that is not set, by state_dir"
        ) from None


def _configure_sqlite(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    # Allow readers alongside one writer, and wait for locks instead of failing.
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA busy_timeout=10000")
    # Issued keys and acknowledged checkpoints must survive a power loss.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
    # SQLite's own folds ASCII only.
    connection.create_function("lower", 1, _lower, deterministic=True)


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def migration_config() -> alembic.config.Config:
    """Return Alembic's configuration."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.set_main_option("path_separator", "os")
    return config


def check_revision(url: str) -> None:
    """Check that this release can use the catalog in a file, without writing to its folder.

    A file that is missing or no catalog is accepted, and so is a database on a server: `migrate`
    checks it before it changes it.

    Raises:
        CatalogUnreachableError: the catalog is one of another release.
    """
    parsed = make_url(url)
    file = Path(parsed.database or "")
    if parsed.get_backend_name() != "sqlite" or not file.is_file():
        return
    # Opening a file in another way creates those of the write-ahead log next to it.
    log = file.with_name(f"{file.name}-wal")
    how = "mode=ro" if log.exists() else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?{how}", uri=True)) as connection:
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    except sqlite3.Error:
        return
    _require_known({str(row[0]) for row in rows}, parsed)


async def migrate(engine: AsyncEngine) -> None:
    """Migrate the schema to the current version, without a timeout. Replicas migrate in turn.

    Raises:
        CatalogUnreachableError: the database does not respond or is damaged, or it is the catalog
            of another release; nothing was changed.
    """
    where = engine.url.render_as_string(hide_password=True)
    check_revision(engine.url.render_as_string(hide_password=False))

    def upgrade(connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            lock = text("SELECT pg_advisory_xact_lock(:number)")
            connection.execute(lock, {"number": _MIGRATION_LOCK})
        found = MigrationContext.configure(connection).get_current_heads()
        _require_known(set(found), engine.url)
        config = migration_config()
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")

    unlimited = _open(engine.url, statement_seconds=None)
    try:
        async with unlimited.begin() as connection:
            await connection.run_sync(upgrade)
    except WRONG_STATEMENT:
        raise
    except NO_ANSWER as error:
        raise CatalogUnreachableError(
            f"database_url: cannot open the catalog at {where} ({described(error)})"
        ) from error
    finally:
        await unlimited.dispose()


def described(error: BaseException) -> str:
    """Return the reason of a database error in one line, and what to do if a file is damaged."""
    reason = str(error).splitlines()[0]
    return reason + (_REPAIR if any(text in reason for text in _DAMAGE) else "")


def newest_revision() -> str:
    """Return the revision of the schema that this release makes."""
    return ScriptDirectory.from_config(migration_config()).get_current_head() or ""


def unknown_revision(found: Collection[str]) -> str | None:
    """Return one of the revisions that this release does not have; None if it has all of them."""
    scripts = ScriptDirectory.from_config(migration_config())
    known = {script.revision for script in scripts.walk_revisions()}
    return min(set(found) - known, default=None)


def _require_known(found: set[str], url: URL) -> None:
    """Check the revisions of a catalog.

    Raises:
        CatalogUnreachableError: this release does not have one of them.
    """
    revision = unknown_revision(found)
    if revision is None:
        return
    where = url.render_as_string(hide_password=True)
    if revision.startswith(_BEFORE_RELEASES):
        is_file = url.get_backend_name() == "sqlite"
        other = _REBUILD if is_file else _REBUILD_ELSEWHERE
        raise CatalogUnreachableError(
            f"database_url: the catalog at {where} has revision {revision}, of a tree before"
            f" release 0.1.0, which no release reads; {other}, which lists runs and checkpoints"
            " again, and then create keys, users and projects"
        )
    release = revision.partition("_")[0]
    raise CatalogUnreachableError(
        f"database_url: the catalog at {where} has revision {revision}, and release"
        f" {this_release()} reads revisions up to {newest_revision()}; use release"
        f" {release} or newer, or restore a backup from before the upgrade"
    )
