"""Programs as child processes of this server.

A program has a process group, a folder and a bounded log of its own, limits on memory, files and
threads, and an environment without any variable of the server. When it ends, its launcher ends all
that it has started. It ends with the server, even one that is killed; the next server starts it
again. A program that fails is restarted with exponential backoff, a limited number of times.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import structlog

from tinkercloud_api.config.sections.program_settings import ProgramSettings
from tinkercloud_api.providers.program_runner import ProgramChanged, ProgramLaunch, ProgramState
from tinkercloud_protocol.programs.program_messages import EXIT_FINAL, STATE_DIR, ProgramPhase
from tinkercloud_protocol.wire.errors import Unavailable

log = structlog.get_logger(__name__)

_LAUNCHER = Path(__file__).with_name("program_launcher.py")
_LOG_BYTES = 1 << 20
"""Size at which the log is rotated; the one before it is kept."""
_READ_BYTES = 64 << 10
_STOP_SECONDS = 10.0
"""Time for a program to exit after SIGTERM, before it is killed."""
_KILL_SECONDS = 5.0
"""Time for the launcher to end what a killed program has left, and for the rest of its output."""
_MAX_BACKOFF_SECONDS = 60.0
_OPEN_FILES = 1024
_NICENESS = 5
_INHERITED = ("LANG", "LC_ALL", "PATH", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "LD_LIBRARY_PATH")
"""Variables of the server that a program receives."""


class _Log:
    """The output of a program, of which at least the last `_LOG_BYTES` are kept."""

    def __init__(self, folder: Path) -> None:
        self._current = folder / "output.log"
        self._previous = folder / "output.log.1"

    def write(self, output: bytes) -> None:
        """Append output."""
        with self._current.open("ab") as file:
            file.write(output)
            is_full = file.tell() >= _LOG_BYTES
        if is_full:
            self._current.replace(self._previous)

    def tail(self, max_bytes: int) -> bytes:
        """Return the last bytes."""
        kept = b""
        for path in (self._previous, self._current):
            with contextlib.suppress(FileNotFoundError):
                kept += path.read_bytes()
        return kept[-max_bytes:]

    def last_line(self) -> str:
        """Return the last line that is not empty."""
        lines = self.tail(4096).decode(errors="replace").splitlines()
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")


@dataclass(slots=True)
class _Attempt:
    """One process of a program."""

    process: asyncio.subprocess.Process

    def signal_group(self, number: int) -> None:
        """Send a signal to the program and the processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class _LocalProgram:
    """A program that runs or waits for its next restart."""

    def __init__(self, launch: ProgramLaunch, folder: Path, settings: ProgramSettings) -> None:
        self._launch = launch
        self._folder = folder
        self._settings = settings
        self._log = _Log(folder)
        self._attempt: _Attempt | None = None
        self.state = ProgramState(ProgramPhase.PENDING, launch.restarts)

    async def run(self, changed: ProgramChanged) -> None:
        """Run it, with restarts, until it ends; cancelling this stops it."""
        (self._folder / "work").mkdir(parents=True, exist_ok=True)
        started_at, restarts = datetime.now(UTC), self._launch.restarts
        while True:
            running = ProgramState(
                ProgramPhase.RUNNING,
                restarts,
                self.state.exit_code,
                self.state.message,
                started_at,
            )
            self._change(running, changed)
            code = await self._run_once()
            if code == 0:
                ended = ProgramState(ProgramPhase.SUCCEEDED, restarts, 0, None, started_at)
                self._change(ended, changed)
                return
            message = f"{_ending(code)}: {self._log.last_line()}"
            is_last = restarts - self._launch.restarts >= self._settings.max_restarts
            if code == EXIT_FINAL or is_last:
                failed = ProgramState(ProgramPhase.FAILED, restarts, code, message, started_at)
                self._change(failed, changed)
                return
            restarts += 1
            pause = min(2.0 ** (restarts - self._launch.restarts - 1), _MAX_BACKOFF_SECONDS)
            waiting = ProgramState(
                ProgramPhase.RUNNING, restarts, code, f"restarting after it {message}", started_at
            )
            self._change(waiting, changed)
            await asyncio.sleep(pause)

    def clean(self) -> None:
        """Remove its working folder; its output is kept."""
        shutil.rmtree(self._folder / "work", ignore_errors=True)

    def _change(self, state: ProgramState, changed: ProgramChanged) -> None:
        self.state = state
        changed(self._launch.program_id, state)

    async def _run_once(self) -> int:
        work = self._folder / "work"
        bounds = {
            "memory_bytes": self._settings.memory_bytes,
            "file_bytes": self._settings.file_bytes,
            "open_files": _OPEN_FILES,
            "niceness": _NICENESS,
            "stop_seconds": _STOP_SECONDS,
            "parent_pid": os.getpid(),
        }
        # With a pipe of asyncio, `wait` would return only when nobody holds the pipe any more.
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, "rb") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-I", str(_LAUNCHER), json.dumps(bounds)),
                    *self._command(),
                    cwd=work,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                    env=dict(_environment(self._launch, work)),
                )
            finally:
                os.close(write_end)
            log.info("program started", program_id=self._launch.program_id, pid=process.pid)
            return await self._wait_for(process, output)

    async def _wait_for(self, process: asyncio.subprocess.Process, output: BinaryIO) -> int:
        """Wait for a process and record its output; return its exit code."""
        attempt = self._attempt = _Attempt(process)
        reader = asyncio.create_task(self._read(output))
        try:
            return await process.wait()
        except asyncio.CancelledError:
            await _stop(attempt)
            raise
        finally:
            attempt.signal_group(signal.SIGKILL)
            # A process that has escaped its launcher would hold the pipe open.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader, _KILL_SECONDS)
            self._attempt = None

    def _command(self) -> list[str]:
        if self._launch.module is not None:
            return [sys.executable, "-u", "-m", self._launch.module, *self._launch.args]
        file = self._folder / "program.py"
        file.write_text(self._launch.source or "")
        return [sys.executable, "-u", str(file), *self._launch.args]

    async def _read(self, output: BinaryIO) -> None:
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), output
        )
        try:
            while part := await stream.read(_READ_BYTES):
                self._log.write(part)
        finally:
            transport.close()


class LocalPrograms:
    """Implements `providers.program_runner.ProgramRunner`. Belongs to one event loop."""

    def __init__(self, folder: Path, settings: ProgramSettings) -> None:
        """Create a runner.

        Args:
            folder: contains a folder for each program.
            settings: limits of the programs.
        """
        self._folder = folder
        self._settings = settings
        self._changed: ProgramChanged | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._programs: dict[str, _LocalProgram] = {}

    async def start(self, changed: ProgramChanged) -> None:
        """See `ProgramRunner.start`."""
        self._changed = changed

    def refusal(self, base_model: str | None) -> str | None:  # noqa: ARG002 - part of the interface
        """See `ProgramRunner.refusal`."""
        return None

    async def resume(self, launch: ProgramLaunch) -> bool:  # noqa: ARG002 - part of the interface
        """See `ProgramRunner.resume`: programs end with the server that started them."""
        return False

    async def close(self) -> None:
        """See `ProgramRunner.close`."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def run(self, launch: ProgramLaunch) -> None:
        """See `ProgramRunner.run`."""
        if self._changed is None:
            raise Unavailable("the server is starting; send the request again")
        if launch.program_id in self._tasks:
            return
        program = _LocalProgram(launch, self._folder / launch.program_id, self._settings)
        self._programs[launch.program_id] = program
        task = asyncio.create_task(self._supervise(launch.program_id, program, self._changed))
        self._tasks[launch.program_id] = task

    async def _supervise(
        self, program_id: str, program: _LocalProgram, changed: ProgramChanged
    ) -> None:
        try:
            await program.run(changed)
            await asyncio.to_thread(program.clean)
        except OSError as error:
            reason = f"cannot be started: {error.strerror or error}"
            changed(program_id, ProgramState(ProgramPhase.FAILED, message=reason))
        finally:
            self._tasks.pop(program_id, None)
            self._programs.pop(program_id, None)

    async def halt(self, program_id: str) -> None:
        """See `ProgramRunner.halt`."""
        if (task := self._tasks.get(program_id)) is not None:
            program = self._programs[program_id]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(program.clean)

    async def logs(self, program_id: str, max_bytes: int) -> bytes:
        """See `ProgramRunner.logs`."""
        return await asyncio.to_thread(_Log(self._folder / program_id).tail, max_bytes)


async def _stop(attempt: _Attempt) -> None:
    # The launcher passes it on, and kills what does not end in time.
    with contextlib.suppress(ProcessLookupError):
        attempt.process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_SECONDS + _KILL_SECONDS):
            await attempt.process.wait()
    attempt.signal_group(signal.SIGKILL)
    await attempt.process.wait()


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"


def _environment(launch: ProgramLaunch, work: Path) -> Mapping[str, str]:
    """Return the whole environment of a program: nothing else of the server's is in it."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    own = {
        "HOME": str(work),
        "TMPDIR": str(work),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TINKER_TELEMETRY": "0",
        "TOKENIZERS_PARALLELISM": "false",
        # The computing happens in session heads.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        STATE_DIR: str(work),
    }
    return inherited | own | dict(launch.environment)
