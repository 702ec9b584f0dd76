"""Servers, commands and heads that start in a fork of a warm Python.

Their modules take seconds of processor time to import, half of the time of many tests. A forked
process has its own id, environment and open files, and runs the same module as `python -m` does.
What it lacks is an interpreter of its own: its command line in `/proc` is that of the warm Python.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODULES = (
    "tinkercloud_api.cli",
    "tinkercloud_api.serve.run_server",
    "tinkercloud_worker.run_head",
    "transformers.models.llama.modeling_llama",
)
"""Modules of servers and heads."""
SETTINGS = {
    # The values that servers set for heads, which is too late for imported modules.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
}
_HEAD = "tinkercloud_worker"


class WarmProcess:
    """A process with the interface of `subprocess.Popen`."""

    def __init__(
        self,
        path: Path,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Mapping[int, int],
        *,
        outlives_us: bool = False,
    ) -> None:
        """Start it, as `python -m` does.

        Args:
            path: The socket of the warm Python.
            module: Module to run.
            arguments: Arguments of the module.
            environment: Its whole environment.
            files: Its open files: our number of each, by its own.
            outlives_us: Whether it is the leader of a session and stays when we end.
        """
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
            "files": list(files),
            "is_leader": outlives_us,
            "ends_with_client": not outlives_us,
            "socket": str(path),
        }
        content = json.dumps(request).encode()
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(str(path))
        socket.send_fds(self.connection, [b"%016d" % len(content)], list(files.values()))
        self.connection.sendall(content)
        self.pid = int(self._line())
        self.returncode: int | None = None

    def _line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            part = self.connection.recv(1)
            assert part, "the warm Python has ended"
            line += part
        return line.decode()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.ended(int(self._line()))
        return self.returncode

    def ended(self, returncode: int) -> None:
        """Take note of its end."""
        self.returncode = returncode
        self.connection.close()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: It runs longer than the timeout, in seconds.
        """
        if self.returncode is None:
            if not select.select([self.connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.ended(int(self._line()))
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it without warning."""
        self.send_signal(signal.SIGKILL)


class _Head:
    """A head with the interface of `asyncio.subprocess.Process`."""

    def __init__(self, process: WarmProcess) -> None:
        self._process = process
        self.pid = process.pid
        self._ended = asyncio.ensure_future(self._wait())

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def _wait(self) -> int:
        reader, writer = await asyncio.open_connection(sock=self._process.connection.dup())
        returncode = int(await reader.readline())
        writer.close()
        self._process.ended(returncode)
        return returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def run(
    path: Path, module: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run a module without standard input, and return its output."""
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
        Path(os.devnull).open() as nothing,
    ):
        files = {0: nothing.fileno(), 1: output.fileno(), 2: errors.fileno()}
        returncode = WarmProcess(path, module, arguments, environment, files).wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(module, returncode, output.read(), errors.read())


def prepare(module: str, path: Path) -> None:
    """Make a forked process one that has just started; a server's heads start as it did."""
    for name in ("process_start", "commands.common.progress"):
        sys.modules[f"tinkercloud_api.{name}"].__dict__["STARTED_AT"] = time.monotonic()
    if module == _HEAD:
        return
    cold = asyncio.create_subprocess_exec

    async def started(program: str, *arguments: str, **options: Any) -> Any:
        if arguments[:2] != ("-m", _HEAD):
            return await cold(program, *arguments, **options)
        output = options["stdout"].fileno()
        with Path(os.devnull).open() as nothing:
            files = {0: nothing.fileno(), 1: output, 2: output}
            files |= {number: number for number in options["pass_fds"]}
            environment = options["env"]
            return _Head(
                WarmProcess(path, _HEAD, arguments[2:], environment, files, outlives_us=True)
            )

    vars(asyncio)["create_subprocess_exec"] = started
