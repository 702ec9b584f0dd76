"""Copies the SQLite file of a catalog while servers write to it.

The newest transactions of a running server are in `catalog.db-wal`, so a copy of `catalog.db` alone
lacks them. SQLite's backup API (https://sqlite.org/backup.html) reads both.
"""

import contextlib
import os
import sqlite3
from pathlib import Path

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

_MODE = 0o600
"""The catalog contains the server's secrets and hashes of keys."""


class BackupError(Exception):
    """A backup cannot be made, read or restored; the message says why and what to do."""


def back_up(catalog: Path, target: Path) -> None:
    """Write a consistent copy of a catalog to a new file, which is complete by itself.

    Args:
        catalog: the SQLite file of the catalog; it is not migrated or changed.
        target: the file to create.

    Raises:
        BackupError: the catalog does not exist or is damaged, or the file exists or cannot be
            written; no file is left behind.
    """
    if not catalog.is_file():
        raise BackupError(f"{catalog} does not exist; name the server's folder with --state-dir")
    try:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _MODE))
    except FileExistsError:
        raise BackupError(f"{target} already exists; choose a new file") from None
    except OSError as error:
        raise BackupError(f"cannot create {target} ({error.strerror})") from None
    try:
        _copy(catalog, target)
    except (sqlite3.Error, BackupError) as error:
        for suffix in ("", "-journal", "-wal", "-shm"):
            target.with_name(target.name + suffix).unlink(missing_ok=True)
        raise BackupError(
            f"cannot copy {catalog} to {target} ({error}); nothing was written. If the catalog is"
            " damaged, restore an older backup, or move the file away and run `tinkercloud catalog"
            " rebuild`"
        ) from None


def _copy(catalog: Path, target: Path) -> None:
    with (
        contextlib.closing(
            sqlite3.connect(f"{catalog.absolute().as_uri()}?mode=rw", uri=True)
        ) as source,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        source.backup(copy)
    seal(target)


def seal(file: Path) -> None:
    """Make one file all of a catalog that no process uses.

    Raises:
        BackupError: it is damaged.
        sqlite3.Error: it can't be read or written.
    """
    with contextlib.closing(sqlite3.connect(file)) as catalog:
        # With a write-ahead log, a part of it would be in another file.
        catalog.execute("PRAGMA journal_mode=DELETE")
    check(file)


def check(file: Path) -> None:
    """Check that a sealed catalog is not damaged.

    Raises:
        BackupError: it is.
    """
    try:
        with contextlib.closing(sqlite3.connect(_read_only(file), uri=True)) as catalog:
            (result,) = catalog.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.Error as error:
        result = str(error)
    if result != "ok":
        raise BackupError(f"{file.name} is damaged ({result})")


def revisions(file: Path) -> list[str]:
    """Return the revisions of a catalog's schema.

    Raises:
        BackupError: the file is no catalog.
    """
    try:
        return [row for (row,) in _rows(file, "SELECT version_num FROM alembic_version")]
    except sqlite3.Error as error:
        raise BackupError(f"{file.name} is not a catalog ({error})") from None


def named_checkpoints(file: Path) -> dict[CheckpointPath, str]:
    """Return the checkpoints that a catalog names as existing and not damaged.

    Returns:
        When each was created, as the database has it.

    Raises:
        BackupError: the file can't be read.
    """
    query = (
        "SELECT run_id, kind, name, created_at FROM checkpoints WHERE created_at IS NOT NULL AND"
        " damage IS NULL"
    )
    try:
        found = _rows(file, query)
        return {
            CheckpointPath(run, CheckpointKind(kind), name): at for run, kind, name, at in found
        }
    except (sqlite3.Error, ValueError, InvalidRequest) as error:
        raise BackupError(f"{file.name} can't be read ({error})") from None


def _rows(file: Path, query: str) -> list[tuple[str, ...]]:
    with contextlib.closing(sqlite3.connect(_read_only(file), uri=True)) as catalog:
        return catalog.execute(query).fetchall()


def _read_only(file: Path) -> str:
    return f"{file.absolute().as_uri()}?mode=ro"
