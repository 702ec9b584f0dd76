"""The folder `heads/<name>` of a local head: its lock, its log, and why it ended.

A head holds a lock on `head.lock` while its process lives (it inherits the open file), so that
every server can detect its end, even one that did not start it.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tinkercloud_api.providers.base import HeadFailed

_LOG_TAIL_BYTES = 4096
_IS_ERROR = re.compile(r'"level": "(error|critical)"|Error\b')


def folder_of(state_dir: Path, model_name: str) -> Path:
    """Return the folder of the head of a model, with a readable name that no other model has."""
    readable = re.sub(r"[^0-9A-Za-z.-]+", "-", model_name).strip("-.")[:48]
    unique = hashlib.sha256(model_name.encode()).hexdigest()[:8]
    return state_dir.absolute() / "heads" / f"{readable}-{unique}"


def is_running(state_dir: Path, model_name: str) -> bool:
    """Return whether a head of a model is running, started by any server of a state folder."""
    try:
        with (folder_of(state_dir, model_name) / "head.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


class HeadFolder:
    """The files of one head, which outlive its process and the server."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "head.log"
        self.reason = path / "reason"
        """Where a head writes why it ends itself."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[IO[str]]:
        """Hold the lock, as do the processes that inherit the open file.

        Raises:
            BlockingIOError: a head holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "head.lock").open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield lock

    def running_pid(self) -> int | None:
        """Return the process id of the head, started by any server, or None if there is none.

        Raises:
            HeadFailed: the file that says it is damaged.
        """
        try:
            with self.locked():
                return None
        except BlockingIOError:
            lock = self.path / "head.lock"
            return _pid_in(lock.read_text(), lock)

    async def wait_until_ended(self) -> None:
        """Wait until all processes of the head have ended."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "head.lock").open("a+") as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)

    def write_secret(self, name: str, content: str) -> None:
        """Atomically write a file that only this user can read."""
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / f".{name}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        temporary.replace(self.path / name)

    def keep_log(self) -> None:
        """Keep the log of the last head that was ready, which may show why it ended.

        Failed starts do not replace it: their reasons are in the server's own log.
        """
        with contextlib.suppress(FileNotFoundError):
            (self.path / "head.json").unlink()
            self.log.replace(self.path / "head.log.1")

    def stated_reason(self) -> str | None:
        """Return why the head has ended itself; None if it has not said so."""
        with contextlib.suppress(FileNotFoundError):
            return self.reason.read_text().strip() or None
        return None

    def progress(self) -> str | None:
        """Return what the head has logged last about how far it is; None if it has not yet."""
        with contextlib.suppress(FileNotFoundError):
            for line in reversed(self._log_lines()):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    return str(json.loads(line)["progress"])
        return None

    def logged_error(self) -> str | None:
        """Return the last error that the head has logged, if any."""
        errors = [each for each in self._log_lines() if _IS_ERROR.search(each)]
        return errors[-1][:500] if errors else None

    def last_line(self, code: int) -> str:
        """Describe how a head exited that has not said why."""
        lines = self._log_lines()
        return f"status {code}, and its log ends with {(lines or ['nothing'])[-1][:500]}"

    def _log_lines(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace")
        return [line for line in tail.splitlines() if line.strip()]


def lock_content(pid: int) -> str:
    """Return the content of the lock file while a process holds the lock."""
    return f"{pid} {_checksum(pid)}"


def _checksum(pid: int) -> str:
    return f"{zlib.crc32(str(pid).encode()):08x}"


def _pid_in(content: str, file: Path) -> int | None:
    """Return the process id in a lock file; None if the head has just taken the lock.

    Raises:
        HeadFailed: the file is damaged. Another process would be stopped in place of the head.
    """
    pid, _, checksum = content.partition(" ")
    if pid.isdecimal() and checksum == _checksum(int(pid)):
        return int(pid)
    if not content:
        return None
    raise HeadFailed(
        f"{file} is damaged: it should have the process id of the running session head, but has"
        f" {content[:80]!r}; end the processes that hold this file (fuser {file}), and start again"
    )
