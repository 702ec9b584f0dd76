"""Child processes that never outlive the test run, and the folders of their state."""

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS, wait_until

ROOT = Path(__file__).parents[5]
BUILDER = ROOT / "tools" / "cluster" / "build.py"
_FOLDER_PREFIX = "tinkercloud-cluster-"
_STOP_SECONDS = 30


class ProgramFailed(Exception):
    """A program exited or was not ready in time; the message ends with its log."""


@functools.cache
def build_folder(*programs: str) -> Path:
    """Build missing programs; return the folder with `bin/` and `share/`."""
    built = subprocess.run(
        [sys.executable, str(BUILDER), *programs], check=True, text=True, stdout=subprocess.PIPE
    )
    return Path(built.stdout.strip())


def binary(name: str) -> Path:
    """Build a program if it is missing; return its path."""
    return build_folder(name) / "bin" / name


def layer_folder() -> Path:
    """Return the folder of the layers of images, which all builds share."""
    return build_folder("kubectl").parent / "layers"


def system_tool(name: str) -> str:
    """Return the path of a tool of the operating system.

    Raises:
        FileNotFoundError: It is not installed.
    """
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed; the test cluster needs it")
    return found


def accepts_connections(port: int) -> bool:
    """Whether a process listens on a loopback port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock; other processes wait. The kernel releases it when its holder exits."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass
class Program:
    """A program. `start`, `stop` and `kill` may be called repeatedly and in any order.

    The kernel kills it when the thread that started it ends, so start programs in a thread that
    lives long enough, such as the main one.
    """

    name: str
    arguments: Sequence[str]
    log: Path
    ready: Callable[[], bool]
    """Returns whether it is ready; called until it is."""
    environment: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = PATIENCE_SECONDS
    process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether its process is running."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it unless it is running, and wait until it is ready.

        Raises:
            ProgramFailed: It exited, or was not ready in time.
        """
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start it unless it is running, without waiting."""
        if self.is_running:
            return
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [system_tool("setpriv"), "--pdeathsig", "KILL", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until it is ready.

        Raises:
            ProgramFailed: It exited, or was not ready in time.
        """
        try:
            wait_until(lambda: not self.is_running or self.ready(), self.name, self.start_seconds)
        except TimeoutError as error:
            raise ProgramFailed(f"{error}\n{self.log_tail()}") from error
        if not self.is_running:
            raise ProgramFailed(f"{self.name} exited\n{self.log_tail()}")

    def stop(self) -> None:
        """Terminate it gracefully; kill it if it does not exit in time."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(_STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill it immediately."""
        self._signal(signal.SIGKILL)
        self._wait(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep it from running for a block."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def restart(self) -> None:
        """Stop it, then start it."""
        self.stop()
        self.start()

    def log_tail(self, lines: int = 40) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running and self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _wait(self, seconds: float | None) -> None:
        if self.process is not None:
            self.process.wait(seconds)


@contextlib.contextmanager
def state_folder() -> Iterator[Path]:
    """Create a folder for a block, and remove the folders of killed runs.

    The owner of a folder holds a lock in it.
    """
    for abandoned in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        _remove_if_abandoned(abandoned)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    with locked(folder / "owner.lock"):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_abandoned(folder: Path) -> None:
    # Another run is currently creating a folder that has no lock file yet.
    with (
        contextlib.suppress(FileNotFoundError, BlockingIOError),
        (folder / "owner.lock").open() as f,
    ):
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
