"""Becomes a program: bounds this process, then executes the program in its place.

Runs as a script without any package of ours: `python -I program_launcher.py LIMITS COMMAND...`,
LIMITS being JSON with the fields `memory_bytes`, `file_bytes`, `open_files`, `niceness` and
`parent_pid`.
"""

import ctypes
import json
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(limits: str, *command: str) -> None:
    """Bound this process and execute a command."""
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
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != bounds["parent_pid"]:
            sys.exit("the server ended before the program started")
    os.execv(command[0], command)  # noqa: S606 - the server chose the command


if __name__ == "__main__":
    main(*sys.argv[1:])
