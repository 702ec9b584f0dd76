"""The folder for what must survive: that it is there, and which server of this machine uses it."""

import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

PID_FILE = "server.pid"


class StateFolderError(Exception):
    """A state folder can't be used, or is used already; the message says why, and what to do."""


def make(folder: Path) -> None:
    """Make a state folder if it is not there.

    Raises:
        StateFolderError: it can't be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise StateFolderError(
            f"state_dir: {folder} can't be used ({why}): choose a folder that can be written, with"
            " --state-dir or TINKERCLOUD_STATE_DIR"
        ) from None


class Served:
    """A context in which this process alone serves a state folder, and a file says so.

    The lock on the file counts, not the file: it ends with the process, however that ends.

    Raises:
        StateFolderError: another process serves it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None

    def __enter__(self) -> None:
        self._file = (self._folder / PID_FILE).open("a+")
        if not _lock(self._file):
            raise StateFolderError(
                f"process {running_server(self._folder)} serves {self._folder} already: stop it,"
                " or choose another folder with --state-dir or TINKERCLOUD_STATE_DIR"
            )
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def __exit__(self, *_exception: object) -> None:
        if self._file is not None:
            self._file.close()


def running_server(folder: Path) -> int | None:
    """Return the process that serves a state folder; None if none does."""
    try:
        with (folder / PID_FILE).open() as file:
            return None if _lock(file) else int(file.read())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
