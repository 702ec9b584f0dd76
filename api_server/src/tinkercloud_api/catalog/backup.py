"""Copies the SQLite file of a catalog while servers write to it.

The newest transactions of a running server are in `catalog.db-wal`, so a copy of `catalog.db` alone
lacks them. SQLite's backup API (https://sqlite.org/backup.html) reads both.
"""

import contextlib
import os
import sqlite3
from pathlib import Path

_MODE = 0o600
"""The catalog contains the server's secrets and hashes of keys."""


class BackupError(Exception):
    """The catalog cannot be backed up; the message says why and what to do."""


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
        # The copy inherits the write-ahead log, with which a single file would not be all of it.
        copy.execute("PRAGMA journal_mode=DELETE")
        (result,) = copy.execute("PRAGMA integrity_check(1)").fetchone()
        if result != "ok":
            raise BackupError(result)
