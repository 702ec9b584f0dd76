"""The head's side of the nursery: processes that compute losses, and how they have ended."""

import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable, WireError
from tinkercloud_worker.custom_losses import child
from tinkercloud_worker.custom_losses.messages import TaskMemory

_START_SECONDS = 120.0
"""How long a nursery may take to start: importing torch takes seconds, on busy machines many."""
_PROGRAM = "tinkercloud_worker.custom_losses.child"


class LossEnded(WireError):
    """A custom loss was ended: by what it did to its process, or by a limit.

    It would not always end so again, so its request must not be computed once more.
    """

    status = 400
    category = "user"


class NurseryLost(Exception):
    """The nursery has ended."""


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """What a task may take."""

    seconds: float
    cpu_seconds: float


class Nursery:
    """Starts processes, and says how they ended. Thread-safe."""

    def __init__(self, control: socket.socket, pid: int, end: Callable[[], None]) -> None:
        """Make the head's side of a nursery.

        Args:
            control: a socket to the nursery.
            pid: its process.
            end: ends the process, also one that hangs. It is called once.
        """
        self._control = control
        self.pid = pid
        self._end: Callable[[], None] | None = end
        self._lock = threading.Lock()

    @classmethod
    def forked(cls) -> Self:
        """Fork this process, which must not have used torch yet, nor have started threads."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            try:
                _leave_files(theirs.fileno())
                child.serve(theirs)
            except BaseException:  # noqa: BLE001 - `os._exit` would hide it
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()
        return cls(ours, pid, partial(_end_fork, pid))

    @classmethod
    def started(cls) -> Self:
        """Start a nursery as a program, which takes seconds until it serves."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return cls(ours, process.pid, partial(_end_program, process))

    def start(self, threads: int, max_bytes: int) -> "LossChild":
        """Start a process.

        Args:
            threads: of torch in it.
            max_bytes: memory that it may take in addition to what it starts with.

        Raises:
            NurseryLost: the nursery has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            config = {"threads": threads, "max_bytes": max_bytes}
            try:
                answer = self._ask({"start": config}, [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return LossChild(self, answer["pid"], ours)

    def end(self, pid: int) -> int:
        """End a process that this nursery started; return its exit code, negative for a signal.

        Raises:
            NurseryLost: the nursery has ended, and the process with it.
        """
        return self._ask({"end": pid}, [])["status"]

    def _ask(self, message: dict[str, Any], files: list[int]) -> dict[str, int]:
        with self._lock:
            try:
                self._control.settimeout(_START_SECONDS)
                socket.send_fds(self._control, [json.dumps(message).encode()], files)
                answer = self._control.recv(child.MAX_MESSAGE_BYTES)
            except OSError as error:
                # A late answer would be taken for that to the next question.
                self._control.close()
                raise NurseryLost(str(error)) from error
        if not answer:
            raise NurseryLost("it has closed its socket")
        found: dict[str, int] = json.loads(answer)
        return found

    def close(self) -> None:
        """End the nursery and all of its processes. Idempotent."""
        self._control.close()
        # Once only: the number may belong to another process later.
        end, self._end = self._end, None
        if end is not None:
            end()


def _end_fork(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _end_program(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def _leave_files(control: int) -> None:
    """Close all files of the forked head but the standard ones and the control socket."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(3, control)
    os.closerange(control + 1, most)
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing != 0:
        os.dup2(nothing, 0)
        os.close(nothing)


class LossChild:
    """A process that computes losses. One thread at a time uses it."""

    def __init__(self, nursery: Nursery, pid: int, channel: socket.socket) -> None:
        self._nursery = nursery
        self.pid = pid
        self._channel = channel

    @property
    def is_closed(self) -> bool:
        """Whether the process has ended, as far as is known here."""
        return self._channel.fileno() < 0

    @property
    def is_alive(self) -> bool:
        """Whether a process without a task still exists."""
        try:
            self._channel.settimeout(0)
            self._channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def run(self, name: str, memory: TaskMemory, limits: TaskLimits, max_bytes: int) -> float:
        """Compute a task; return the CPU seconds that it took. Unless it succeeds, it is closed.

        Args:
            name: of the loss, for messages.
            memory: the task.
            limits: what it may take.
            max_bytes: what the process may take, for messages.

        Raises:
            InvalidRequest: an operation of the loss failed. The process can be used again.
            LossEnded: the process has ended.
            Unavailable: the nursery has ended, and all processes with it.
        """
        self._channel.settimeout(limits.seconds)
        try:
            message = child.TASK.pack(limits.cpu_seconds)
            socket.send_fds(self._channel, [message], [memory.fd])
            answer = self._channel.recv(child.MAX_MESSAGE_BYTES)
        except TimeoutError:
            self.close()
            raise LossEnded(
                f"custom loss {name!r}: took more than {limits.seconds:.3g} seconds"
                " (limits.max_loss_seconds for all data of a request) and was ended; send less data"
                " per request, or use a simpler loss"
            ) from None
        except OSError:
            answer = b""
        if len(answer) < child.ANSWER.size:
            raise LossEnded(f"custom loss {name!r}: {self._death()}")
        return self._checked(name, answer, limits, max_bytes)

    def _checked(self, name: str, answer: bytes, limits: TaskLimits, max_bytes: int) -> float:
        kind, seconds = child.ANSWER.unpack_from(answer)
        if kind == child.DONE:
            return 0.0 if math.isnan(seconds) else min(max(seconds, 0.0), limits.cpu_seconds)
        if kind == child.FAILED:
            text = answer[child.ANSWER.size :].decode(errors="replace")
            raise InvalidRequest("".join(c if c.isprintable() else " " for c in text))
        self.close()
        raise LossEnded(
            f"custom loss {name!r}: needs more memory than {max_bytes} bytes"
            " (limits.max_loss_bytes); use shorter sequences, or a simpler loss"
        )

    def _death(self) -> str:
        """Return how the process, which has ended, has ended.

        Raises:
            Unavailable: the nursery has ended, so that nothing speaks against this loss.
        """
        self._channel.close()
        try:
            status = self._nursery.end(self.pid)
        except NurseryLost as error:
            raise Unavailable(
                "the processes that compute custom losses have ended; send the step's data again"
            ) from error
        return f"the process that computed it {_in_words(status)}"

    def close(self) -> None:
        """End the process. Idempotent."""
        if self.is_closed:
            return
        self._channel.close()
        with suppress(NurseryLost):
            self._nursery.end(self.pid)


_OF_SIGNALS = {
    signal.SIGFPE: "an arithmetic error, such as an integer division that overflows; divide floats"
    " instead",
    signal.SIGXCPU: "it used more CPU time than a request may (limits.max_loss_cpu_seconds); send"
    " less data per request, or use a simpler loss",
    signal.SIGKILL: "for example because memory ran out, or somebody ended it; send the step's data"
    " again, or use a simpler loss",
}


def _in_words(status: int) -> str:
    if status >= 0:
        return f"has ended with exit code {status}; use a simpler loss"
    try:
        name, why = signal.Signals(-status).name, _OF_SIGNALS.get(signal.Signals(-status))
    except ValueError:
        name, why = f"signal {-status}", None
    return f"was ended by {name}: {why or 'an operation failed badly; use a simpler loss'}"
