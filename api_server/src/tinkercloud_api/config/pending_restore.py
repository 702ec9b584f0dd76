"""The last step of `tinkercloud backup restore`, which replaces everything or nothing.

A restore writes its files to a folder `restore-incomplete` next to those that they replace. One
rename of `restore-committed.json` in the state folder then decides that they do: before it, the
folder has its old content, and after it, `finish` moves the new files into place. The next process
that uses the folder calls `finish` too, so one that is killed in between leaves no mixture. All
functions block, and expect the lock of the state folder to be held.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

STAGING = "restore-incomplete"
"""Folder for the new files of a restore and the old files that they replace."""
RECORD = "restore-committed.json"
_NEW, _OLD = "new", "old"


class Restore(BaseModel):
    """Content of `restore-committed.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    targets: Sequence[Path]
    """Folders that get the content of `new_files`, each entry as a whole."""
    obsolete: Sequence[Path]
    """Files and folders of the old content that have none in the new one. Each is in one of the
    targets."""


def new_files(target: Path) -> Path:
    """Return the folder for the new files of a folder."""
    return target / STAGING / _NEW


def is_pending(folder: Path) -> bool:
    """Return whether a restore has left something to do in a state folder."""
    return (folder / STAGING).exists() or (folder / RECORD).exists()


def begin(folder: Path, restore: Restore) -> None:
    """Make empty folders for the new files, and delete what an earlier restore has left in them.

    Args:
        folder: the state folder.
        restore: what will replace what, as far as that is known.

    Raises:
        OSError: they can't be written.
    """
    for target in (folder, *restore.targets):
        shutil.rmtree(target / STAGING, ignore_errors=True)
        new_files(target).mkdir(parents=True, exist_ok=True)
    (folder / STAGING / RECORD).write_text(restore.model_dump_json())


def commit(folder: Path, restore: Restore) -> None:
    """Decide that the new files, which must be on the disk, replace the old ones.

    Args:
        folder: the state folder.
        restore: what replaces what.

    Raises:
        OSError: the decision could not be written; nothing has changed.
    """
    staged = folder / STAGING / f"{RECORD}.new"
    with staged.open("w") as file:
        file.write(restore.model_dump_json())
        file.flush()
        os.fsync(file.fileno())
    staged.replace(folder / RECORD)
    synchronize(folder)


def finish(folder: Path) -> None:
    """Move the files of a decided restore into place, or delete those of an undecided one.

    It may be repeated, from wherever it was interrupted.

    Raises:
        OSError: a file could not be moved; the next call continues.
    """
    record = folder / RECORD
    is_decided = record.exists()
    restore = _read(record if is_decided else folder / STAGING / RECORD)
    if is_decided:
        _replace(restore)
        record.unlink()
        synchronize(folder)
    # That of the state folder last: it names the others.
    for target in [each for each in restore.targets if each != folder] + [folder]:
        shutil.rmtree(target / STAGING, ignore_errors=True)


def _read(record: Path) -> Restore:
    try:
        return Restore.model_validate_json(record.read_bytes())
    except (FileNotFoundError, ValidationError):
        # It was not decided, or it is finished: a decision is written atomically.
        return Restore(targets=[], obsolete=[])


def _replace(restore: Restore) -> None:
    for path in restore.obsolete:
        _move_aside(path)
    for target in restore.targets:
        new = new_files(target)
        for entry in sorted(new.iterdir()) if new.exists() else []:
            # While the new one is here, the one in its place is the old one.
            _move_aside(target / entry.name)
            entry.rename(target / entry.name)
        synchronize(target)


def _move_aside(path: Path) -> None:
    """Move an old file or folder, which may be missing, to the staging folder next to it."""
    if not path.exists() and not path.is_symlink():
        return
    old = path.parent / STAGING / _OLD
    old.mkdir(parents=True, exist_ok=True)
    number = sum(1 for _ in old.iterdir())
    path.rename(old / f"{number}-{path.name}")


def synchronize(folder: Path) -> None:
    """Return once the list of a folder's files is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
