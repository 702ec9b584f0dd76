"""The state folder: creating it, its version, and locking out others that use it."""

import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, ValidationError

from tinkercloud_api.config import pending_restore
from tinkercloud_protocol.heads.releases import Versions, this_release

PID_FILE = "server.pid"
VERSION_FILE = "version.json"
RESTORE = "(restore)"
"""Use of a state folder by the restore of a backup, instead of a server's URL."""
VERSIONS = Versions(1, 1)
"""Versions of the folder's layout: which files it has, apart from those that name their own."""


class FolderVersion(BaseModel):
    """Content of `version.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int
    release: str
    """The release that wrote the file."""


class StateFolderError(Exception):
    """The state folder is unusable or already in use; the message says why and what to do."""


def check_version(folder: Path) -> None:
    """Check that this release can use a state folder, without changing it.

    A folder without a version is one that no server has used.

    Raises:
        StateFolderError: a newer release has used it, or its version can't be read.
    """
    file = folder / VERSION_FILE
    try:
        found = FolderVersion.model_validate_json(file.read_bytes())
    except OSError:
        # `make` says why the folder can't be used.
        return
    except ValidationError:
        raise StateFolderError(
            f"state_dir: {file} is damaged; restore it from a backup, or delete it if no release"
            f" after {this_release()} has used the folder"
        ) from None
    if why := VERSIONS.refusal(f"state_dir: {file}", found.version, found.release):
        raise StateFolderError(f"{why}, or restore a backup from before the upgrade")


def make(folder: Path) -> None:
    """Create a state folder if it does not exist, and record its version.

    A restore that was killed is finished.

    Raises:
        StateFolderError: the folder cannot be created or is not writable, a backup is being
            restored to it, or `check_version`.
    """
    finish_restore(folder)
    check_version(folder)
    try:
        # It has the hashes of keys, and the server's secrets.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if not (folder / VERSION_FILE).exists():
            write_version(folder)
    except OSError as error:
        why = "not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise StateFolderError(
            f"state_dir: cannot use {folder} ({why}); choose a writable folder with --state-dir or"
            " TINKERCLOUD_STATE_DIR"
        ) from None


def write_version(folder: Path) -> None:
    """Record that this release has used a folder.

    Raises:
        OSError: the file can't be written.
    """
    ours = FolderVersion(version=VERSIONS.newest, release=this_release())
    staged = folder / f"{VERSION_FILE}.{os.getpid()}"
    staged.write_text(ours.model_dump_json())
    staged.replace(folder / VERSION_FILE)


def finish_restore(folder: Path) -> None:
    """Finish a restore that was killed, or delete what it has left.

    Raises:
        StateFolderError: a backup is being restored to the folder, or a file can't be moved.
    """
    if not pending_restore.is_pending(folder):
        return
    with StateFolderLock(folder, RESTORE):
        try:
            pending_restore.finish(folder)
        except OSError as error:
            raise StateFolderError(
                f"state_dir: cannot finish the restore of a backup to {folder} ({error}); repair"
                " the disk, then try again"
            ) from None


class StateFolderLock:
    """A context in which this process has exclusive use of a state folder.

    A lock on the PID file enforces this, not the file itself: the lock ends with the process, even
    if the process is killed.

    Raises:
        StateFolderError: another process uses the folder.
    """

    def __init__(self, folder: Path, use: str) -> None:
        """Create a lock.

        Args:
            folder: the state folder, which must exist.
            use: URL of this server for clients on this machine, or `RESTORE`.
        """
        self._folder = folder
        self._use = use
        self._file: IO[str] | None = None

    def __enter__(self) -> None:
        self._file = (self._folder / PID_FILE).open("a+")
        if not lock(self._file):
            self._file.close()
            raise StateFolderError(_in_use(self._folder))
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n{self._use}\n")
        self._file.flush()

    def __exit__(self, *_exception: object) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The server process that uses a state folder."""

    pid: int
    url: str
    """URL of the server."""


def running_server(folder: Path) -> RunningServer | None:
    """Return the server that uses a state folder, or None."""
    user = _user(folder)
    return user if user is not None and user.url != RESTORE else None


def _user(folder: Path) -> RunningServer | None:
    """Return the process that has locked a state folder, or None."""
    try:
        with (folder / PID_FILE).open() as file:
            if lock(file):
                return None
            pid, _, url = file.read().partition("\n")
            return RunningServer(int(pid), url.strip())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _in_use(folder: Path) -> str:
    user = _user(folder)
    if user is not None and user.url == RESTORE:
        return f"process {user.pid} is restoring a backup to {folder}; wait until it has ended"
    pid = user.pid if user is not None else "(unknown)"
    return (
        f"process {pid} already serves {folder}; stop it or choose another folder with --state-dir"
        " or TINKERCLOUD_STATE_DIR"
    )


def lock(file: IO[str]) -> bool:
    """Lock a file until it is closed; return whether no other process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
