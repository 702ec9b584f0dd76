"""Programs in environments of other SDK versions, which `tools/compatibility/install.py` makes."""

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

ROOT = Path(__file__).parents[4]
PROGRAM = ROOT / "tools" / "compatibility" / "program.py"
VERSIONS_FILE = PROGRAM.with_name("versions.txt")
RESULTS = ROOT / "docs" / "compatibility.json"
"""Committed results: the fingerprint of the program, and the result of each method by version."""

MODEL = "tiny/llama"
ALIAS = "Qwen/Qwen3-4B-Instruct-2507"
_PROJECT = "a-project"
"""The project that the clients are configured with, and that the program assigns a session to."""
_AT_ONCE = 3
"""Versions that are exercised concurrently; the programs mostly wait for the server."""
_PROGRAM_SECONDS = 600
_TORCH = [
    "torch",
    "torchgen",
    "functorch",
    "nvidia",
    "cuda",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
    "filelock",
]
"""Packages that `import torch` needs, apart from those of the SDK."""


class NotInstalledError(Exception):
    """The environment of an SDK version is missing; the message says how to make it."""


def environments() -> Path:
    """Return the folder of the environments, one for each SDK version."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tinkercloud" / "compatibility"


def versions() -> list[str]:
    """Return the listed SDK versions, oldest first."""
    lines = VERSIONS_FILE.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def interpreter(version: str) -> Path:
    """Return the Python of an SDK version.

    Raises:
        NotInstalledError: its environment does not exist.
    """
    environment = environments() / f"tinker-{version}"
    if not (environment / "installed").exists():
        raise NotInstalledError(
            f"no environment of tinker {version} in {environment}; run `make test-tools` or"
            " `make compatibility`"
        )
    return environment / "bin" / "python"


@contextmanager
def a_server_without_sdk(folder: Path) -> Iterator[Server]:
    """Run a server of MODEL, also under ALIAS, in which any import of the SDK fails."""
    packages = folder / "without-sdk"
    (packages / "tinker").mkdir(parents=True)
    (packages / "tinker" / "__init__.py").write_text("raise ImportError('the server needs no SDK')")
    settings = {
        "TINKERCLOUD_ALIASES": json.dumps({ALIAS: MODEL}),
        "PYTHONPATH": str(packages),
    }
    models = {MODEL: save(tiny_llama(), folder / "llama")}
    with a_server(folder / "state", models, settings) as server:
        yield server


def exercise(wanted: list[str], server: Server, folder: Path) -> dict[str, dict[str, str]]:
    """Run the program with several SDK versions.

    Args:
        wanted: the versions.
        server: `a_server_without_sdk`.
        folder: an empty folder for logs and caches.

    Returns:
        For each version the result of each method: "works" or why not.
    """
    project = {"name": _PROJECT, "project_id": _PROJECT}
    assert server.post("projects", project).status == 200
    packages = folder / "torch"
    packages.mkdir()
    installed = Path(torch.__file__).parents[1]
    for name in _TORCH:
        if (installed / name).exists():
            (packages / name).symlink_to(installed / name)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(lambda version: _exercise(version, server, folder), wanted)
        return dict(zip(wanted, found, strict=True))


def _exercise(version: str, server: Server, folder: Path) -> dict[str, str]:
    log, owner = folder / f"tinker-{version}.log", f"tinker-{version}"
    added = server.request(
        "PUT", f"/api/v1/projects/{_PROJECT}/members/{owner}", {"role": "member"}
    )
    assert added.status == 200, added.body
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": server.new_key(owner),
        "TINKER_PROJECT_ID": _PROJECT,
        "HF_ENDPOINT": f"{server.url}/hf",
        "HF_HOME": str(folder / f"hub-{version}"),
        "OMP_NUM_THREADS": "1",
        "COMPATIBILITY_MODEL": MODEL,
        "COMPATIBILITY_ALIAS": ALIAS,
        "COMPATIBILITY_TORCH": str(folder / "torch"),
    }
    with log.open("wb") as errors:
        result = subprocess.run(
            [str(interpreter(version)), str(PROGRAM)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=_PROGRAM_SECONDS,
            check=False,
        )
    assert result.returncode == 0, f"tinker {version}: {log.read_text()[-4000:]}"
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["version"] == version
    return dict(answer["results"])
