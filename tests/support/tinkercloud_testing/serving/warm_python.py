"""Imports modules once for many processes.

`python -m tinkercloud_testing.serving.warm_python SOCKET MODULE...`

Importing torch, transformers and megatron-core takes longer than the work of most processes in
tests. A process that has imported them forks for every request at a socket. Each fork runs a script
or a module with the modules already imported: ranks, which `warm_start.py` requests for Ray, and
servers, commands and heads, which `warm_processes` requests.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

from tinkercloud_testing.cluster.image_build.programs import Program
from tinkercloud_testing.serving import warm_processes

RANK_MODULES = (
    "tinkercloud_worker.build_trainer",
    "tinkercloud_worker.megatron_trainer.model",
    "tinkercloud_worker.megatron_trainer.trainer",
)
"""Modules of ranks, without those of Ray, which reads its settings on import."""
_RANK_SETTINGS = {
    # The values that Ray and the group set for ranks, which is too late for imported modules.
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
_CLIENT = Path(__file__).with_name("warm_start.py")


@contextlib.contextmanager
def warm_python(
    folder: Path, modules: Sequence[str], settings: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """Run the process, and return its socket.

    Args:
        folder: The folder of its log and its socket.
        modules: Modules that it imports.
        settings: Environment variables that they read on import.
    """
    path = folder / "socket"
    program = Program(
        name="the warm Python",
        arguments=(sys.executable, "-m", __name__, str(path), *modules),
        log=folder / "log",
        ready=path.exists,
        environment={"PYTHONPATH": str(Path(__file__).parents[2]), **(settings or {})},
    )
    program.start()
    try:
        yield path
    finally:
        program.kill()


@contextlib.contextmanager
def warm_ranks(folder: Path) -> Iterator[Mapping[str, str]]:
    """Run the process; with the returned environment, Ray starts its workers there."""
    with warm_python(folder, RANK_MODULES, _RANK_SETTINGS) as path:
        executable = shlex.join([sys.executable, "-IS", str(_CLIENT), str(path)])
        job = {"runtime_env": {"py_executable": executable}}
        yield {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}


def main() -> None:
    """Serve until killed."""
    path, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    # Finished forks must be reaped immediately, because nothing waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        # The socket appears once it can be connected to.
        listening.bind(f"{path}.new")
        listening.listen(64)
        Path(f"{path}.new").rename(path)
        while True:
            asking, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _answer(asking)
                return
            asking.close()


def _answer(asking: socket.socket) -> None:
    """Run what was requested, in this process or, if the client waits for its end, in a child."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, received, _, _ = socket.recv_fds(asking, 16, 253)
    content = b""
    while len(content) < int(header):
        content += asking.recv(1 << 20)
    request = json.loads(content)
    if "script" not in request:
        child = os.fork()
        if child != 0:
            for file in received:
                os.close(file)
            _await(child, asking, ends_with_client=request["ends_with_client"])
    asking.close()
    _become(request, received)


def _await(child: int, asking: socket.socket, *, ends_with_client: bool) -> Never:
    """Send the client the id of a child and, once it has ended, its exit code."""
    asking.sendall(f"{child}\n".encode())
    if ends_with_client:
        gone, ended = asking.fileno(), os.pidfd_open(child)
        if gone in select.select([gone, ended], [], [])[0]:
            os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        asking.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(request: dict[str, Any], received: list[int]) -> None:
    """Run a script or module with its arguments, environment, folder and open files."""
    if request["is_leader"]:
        os.setsid()
    wanted = request["files"]
    # First to numbers that are neither wanted nor received.
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max(wanted + received) + 1) for file in received]
    for file in received:
        os.close(file)
    for number, file in zip(wanted, moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    random.seed()
    if "script" in request:
        sys.argv = [request["script"], *request["arguments"]]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.argv = [request["module"], *request["arguments"]]
        warm_processes.prepare(sys.argv[0], Path(request["socket"]))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
