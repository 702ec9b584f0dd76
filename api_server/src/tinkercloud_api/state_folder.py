"""The folder for what must survive: that it is there, and which server of this machine uses it."""

import fcntl
import os
import tempfile
from dataclasses import dataclass
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


class StateFolderLock:
    """A context in which this process alone serves a state folder, and a file says so.

    The lock on the file counts, not the file: it ends with the process, however that ends.

    Raises:
        StateFolderError: another process serves it.
    """

    def __init__(self, folder: Path, url: str) -> None:
        """Make it.

        Args:
            folder: the state folder, which exists.
            url: where this process serves, as clients on this machine reach it.
        """
        self._folder = folder
        self._url = url
        self._file: IO[str] | None = None

    def __enter__(self) -> None:
        self._file = (self._folder / PID_FILE).open("a+")
        if not _lock(self._file):
            raise StateFolderError(
                f"process {_pid(self._folder)} serves {self._folder} already: stop it,"
                " or choose another folder with --state-dir or TINKERCLOUD_STATE_DIR"
            )
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n{self._url}\n")
        self._file.flush()

    def __exit__(self, *_exception: object) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The process that serves a state folder."""

    pid: int
    url: str | None
    """Where; None if it is of a release that did not write it down."""


def running_server(folder: Path) -> RunningServer | None:
    """Return the process that serves a state folder; None if none does."""
    try:
        with (folder / PID_FILE).open() as file:
            if _lock(file):
                return None
            pid, _, url = file.read().partition("\n")
            return RunningServer(int(pid), url.strip() or None)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _pid(folder: Path) -> str:
    server = running_server(folder)
    return str(server.pid) if server is not None else "of another"


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
