"""An SGLang server on this machine, started as an engine's pod starts it.

Command, options and variables are those that the operator writes into the pod; only paths and the
address are this machine's. Without a GPU, its Triton kernels are interpreted.
"""

import mmap
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import torch

from benchmarks.gpu.bench import SGLANG_PYTHON, Skipped
from tinkercloud_crds import labels
from tinkercloud_operator.children.engines import engines
from tinkercloud_operator.children.pods import TOKEN_FOLDER, Json
from tinkercloud_testing.resources.sessions import TRAINERS, a_base_model, a_build

LAUNCHER = "benchmarks.gpu.sglang_checks.sglang_on_cpu"
OPTIONS = "TINKERCLOUD_BENCHMARK_SGLANG_OPTIONS"
"""Variable with options of SGLang's to add, such as `--attention-backend triton`."""
_ROOT = Path(__file__).parents[3]
_ON_CPU = (
    *("--device", "cpu", "--attention-backend", "triton"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--max-total-tokens", "20000"),
)
_CPU_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",
    # Its other index of prompts is built for one version of torch.
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    # What it would compile is small, and compiling takes longer.
    "TORCHDYNAMO_DISABLE": "1",
    # Ranks would ask the NCCL that torch brings for GPUs; without it they have gloo.
    "SGLANG_NCCL_SO_PATH": "none",
}
_START_SECONDS = 400.0
_STOP_SECONDS = 20.0
_LAST_LINES = 40
_WORDS = 300
"""Characters of each line."""


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    url: str
    key_file: Path
    process_group: int
    """The process group of all its processes."""

    def resident_bytes(self) -> int:
        """Return how much of this machine's memory its processes hold."""
        pages = 0
        for folder in Path("/proc").glob("[0-9]*"):
            # They come and go.
            with suppress(ProcessLookupError, FileNotFoundError):
                if os.getpgid(int(folder.name)) == self.process_group:
                    pages += int((folder / "statm").read_text().split()[1])
        return pages * mmap.PAGESIZE


@contextmanager
def a_server(
    model: Path,
    folder: Path,
    *,
    device: torch.device,
    dtype: str,
    max_lora_rank: int,
    sampler: Json,
) -> Iterator[Server]:
    """Run a server; end it afterwards.

    Args:
        model: a Hugging Face folder.
        folder: for its key and its log.
        device: a GPU, or the CPU.
        dtype: of its weights.
        max_lora_rank: the largest that it takes.
        sampler: a BaseModel's, of whose pods it is the first engine.

    Raises:
        Skipped: it does not start.
    """
    pod = _container(dtype, max_lora_rank, sampler)
    port = _free_port()
    key_file = folder / Path(labels.TOKEN_KEY).name
    key_file.write_text("a-key-of-this-benchmark")
    here = {"--model-path": str(model), "--host": "127.0.0.1", "--port": str(port)}
    arguments = [*_replaced(pod["args"], here), *shlex.split(os.environ.get(OPTIONS, ""))]
    shell = [word.replace(TOKEN_FOLDER, str(folder)) for word in pod["command"]]
    environment = {variable["name"]: variable["value"] for variable in pod["env"]}
    if device.type == "cpu":
        shell = [word.replace("sglang.launch_server", LAUNCHER) for word in shell]
        arguments = [*arguments, *_ON_CPU]
        environment |= _CPU_VARIABLES
        if (ranks := sampler["gpusPerReplica"]) > 1:
            cores = "|".join(str(core) for core in range(ranks))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = cores
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*shell, *arguments],
            env=_inherited() | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield Server(f"http://127.0.0.1:{port}", key_file, process.pid)
    finally:
        _stop(process)


def _inherited() -> dict[str, str]:
    """Return this process's variables, with SGLang's Python first; modules only for its own."""
    python = os.environ.get(SGLANG_PYTHON)
    own = "" if python else os.environ.get("PYTHONPATH", "")
    paths = [str(_ROOT), *own.split(os.pathsep)]
    programs = [str(Path(python or sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def _container(dtype: str, max_lora_rank: int, sampler: Json) -> Json:
    base_model = a_base_model(
        trainer={**TRAINERS, "dtype": dtype},
        sampler=sampler,
        limits={"maxLoraRank": max_lora_rank},
    )
    [container, *_] = engines(a_build(base_model))
    return container


def _replaced(words: Sequence[str], values: dict[str, str]) -> list[str]:
    """Return an argument list with other values of some options."""
    before = ["", *words[:-1]]
    return [values.get(option, word) for option, word in zip(before, words, strict=True)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - this machine's own
                return
        except (URLError, OSError):
            time.sleep(0.5)
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(line[:_WORDS] for line in lines[-_LAST_LINES:]))
    raise Skipped("sglang does not start here; its last lines are above")


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
