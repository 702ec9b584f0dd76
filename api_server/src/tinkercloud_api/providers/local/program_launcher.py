"""Runs a program as a child process, and ends everything that it has started when it ends.

Runs as a script without any package of ours: `python -I program_launcher.py LIMITS COMMAND...`,
LIMITS being JSON with the fields `memory_bytes`, `file_bytes`, `open_files`, `niceness`,
`stop_seconds` and `parent_pid`. The exit status, or the signal, is that of the program.

Processes that a program has detached (`setsid`, a double fork) become children of this one, which
is a subreaper. SIGTERM asks the program to end, which is killed after `stop_seconds`. If the server
dies, everything is killed at once.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IS_LINUX = sys.platform == "linux"


def main(limits: str, *command: str) -> None:
    """Bound this process, and run a command in a child."""
    bounds = json.loads(limits)
    # Only memory that the program writes to counts: libraries reserve much more.
    for kind, amount in (
        (resource.RLIMIT_DATA, bounds["memory_bytes"]),
        (resource.RLIMIT_FSIZE, bounds["file_bytes"]),
        (resource.RLIMIT_NOFILE, bounds["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        bound = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(kind, (bound, bound))
    os.nice(bounds["niceness"])
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGALRM, lambda *_: _kill_children())
    signal.signal(signal.SIGTERM, lambda *_: _end(bounds))
    _control(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if _IS_LINUX and os.getppid() != bounds["parent_pid"]:
        sys.exit("the server ended before the program started")
    own = os.getpid()
    if (program := os.fork()) == 0:
        _become(own, command)
    status = _wait_for(program)
    _end_descendants()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(own, number)
    sys.exit(os.waitstatus_to_exitcode(status))


def _become(parent: int, command: tuple[str, ...]) -> None:
    """Become the program, in the child."""
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        os.execv(command[0], command)  # noqa: S606 - the server chose the command
    os._exit(1)


def _control(option: int, value: int) -> None:
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(option, value)


def _wait_for(program: int) -> int:
    """Wait for the program and reap what it has detached; return the program's status."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            return status


def _end(bounds: dict[str, Any]) -> None:
    """Handle SIGTERM, which this process also gets when the server dies."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _IS_LINUX and os.getppid() != bounds["parent_pid"]:
        _kill_children()
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        return
    signal.setitimer(signal.ITIMER_REAL, bounds["stop_seconds"], 0.1)
    os.killpg(0, signal.SIGTERM)


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def _kill_children() -> None:
    for pid in _children():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _end_descendants() -> None:
    """Kill what the program has left; the children of what is killed become ours."""
    while _children():
        _kill_children()
        os.waitpid(-1, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
