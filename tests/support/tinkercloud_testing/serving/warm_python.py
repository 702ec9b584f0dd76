"""Imports modules once for many ranks.

`python -m tinkercloud_testing.serving.warm_python SOCKET MODULE...`

Importing torch, transformers and megatron-core takes longer than the work of most ranks in tests. A
process that has imported them forks for every script that `warm_start.py` requests at a socket:
each fork runs a script with the modules already imported.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tinkercloud_testing.cluster.image_build.programs import Program

MODULES = (
    "tinkercloud_worker.build_trainer",
    "tinkercloud_worker.megatron_trainer.model",
    "tinkercloud_worker.megatron_trainer.trainer",
)
"""Modules of ranks, without those of Ray, which reads its settings on import."""
_SETTINGS = {
    # The values that Ray and the group set for ranks, which is too late for imported modules.
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
_CLIENT = Path(__file__).with_name("warm_start.py")


@contextlib.contextmanager
def warm_ranks(folder: Path) -> Iterator[Mapping[str, str]]:
    """Run the process; with the returned environment, Ray starts its workers there.

    Args:
        folder: The folder of its log and its socket.
    """
    path = folder / "socket"
    program = Program(
        name="the warm Python",
        arguments=(sys.executable, "-m", __name__, str(path), *MODULES),
        log=folder / "log",
        ready=path.exists,
        environment={"PYTHONPATH": str(Path(__file__).parents[2]), **_SETTINGS},
    )
    executable = shlex.join([sys.executable, "-IS", str(_CLIENT), str(path)])
    program.start()
    try:
        job = {"runtime_env": {"py_executable": executable}}
        yield {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
    finally:
        program.kill()


def main() -> None:
    """Serve until killed."""
    path, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    # Finished forks must be reaped immediately, because nothing waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        while True:
            asking, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _become(asking)
                return
            asking.close()


def _become(asking: socket.socket) -> None:
    """Run the requested script with its arguments, environment, folder and open files."""
    # Ray kills the process groups of its workers.
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    content, files, _, _ = socket.recv_fds(asking, 1 << 20, 3)
    while more := asking.recv(1 << 20):
        content += more
    asking.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    request = json.loads(content)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
