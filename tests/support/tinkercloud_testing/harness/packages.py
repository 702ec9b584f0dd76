"""The built packages, an index that serves them, and environments without the source tree."""

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[4]
UV = ROOT / ".uv" / "bin" / "uv"
_KEPT = ("HOME", "LANG", "SSL_CERT_FILE", "TMPDIR")
"""Variables of the machine; all others could lead to the source tree."""


def build(folder: Path) -> Path:
    """Return the folder with all wheels and source distributions, as `make packages` builds them.

    Args:
        folder: where to build them if `make packages` did not run since the last change.
    """
    made = ROOT / "dist"
    built_at = min((path.stat().st_mtime for path in made.glob("*.whl")), default=0.0)
    sources = [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/src/**/*.py")]
    if all(path.stat().st_mtime < built_at for path in sources):
        return made
    command = [str(UV), "build", "--quiet", "--all-packages", "--out-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@contextlib.contextmanager
def an_index(packages: Path, folder: Path) -> Iterator[str]:
    """Serve packages as PEP 503 asks: a page with links to the files of each. Yields its URL."""
    for package in [*packages.glob("*.whl"), *packages.glob("*.tar.gz")]:
        project = folder / package.name.partition("-")[0].replace("_", "-")
        project.mkdir(parents=True, exist_ok=True)
        (project / package.name).symlink_to(package)
    handler = functools.partial(_Quiet, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None: ...


def locked(file: Path) -> Path:
    """Write the versions of uv.lock as constraints, and return the file.

    Without CUDA's libraries: the workspace overrides what torch requires of them.
    """
    command = [str(UV), "export", "--frozen", "--offline", "--quiet", "--all-packages"]
    command += ["--all-extras", "--no-default-groups", "--group", "demo", "--no-emit-workspace"]
    exported = subprocess.check_output(
        [*command, "--no-hashes", "--no-annotate", "--no-header"], text=True, cwd=ROOT
    )
    file.write_text(
        re.sub(r"^(?:(?![A-Za-z0-9._-]+==)|nvidia-).*\n", "", exported, flags=re.MULTILINE)
    )
    return file


@dataclass(frozen=True)
class Environment:
    """A Python environment, and a folder for the data of its programs."""

    prefix: Path
    home: Path

    @property
    def variables(self) -> dict[str, str]:
        """Variables for its programs."""
        return {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "PATH": f"{self.prefix / 'bin'}:/usr/bin:/bin",
            "COLUMNS": "200",
            "OMP_WAIT_POLICY": "PASSIVE",
            "XDG_DATA_HOME": str(self.home / "data"),
            "HF_HOME": str(self.home / "hf"),
        }

    def command(self, name: str, *arguments: str) -> list[str]:
        """Return a command of this environment."""
        return [str(self.prefix / "bin" / name), *arguments]

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this environment in its folder."""
        return subprocess.run(
            self.command(*command),
            cwd=self.home,
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def uv_pip(self, verb: str, *arguments: str) -> str:
        """Run `uv pip` on this environment, and return its messages."""
        command = [str(UV), "pip", verb, "--no-config", "--python", str(self.prefix), *arguments]
        # Some machines have the CPU build of torch there, which `make install` prefers too.
        wheels = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
        done = subprocess.run(
            command,
            cwd=self.home,
            env={**os.environ, **wheels},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr


def an_environment(folder: Path) -> Environment:
    """Make an empty environment in a folder."""
    command = [str(UV), "venv", "--quiet", "--no-project", "--python", sys.executable]
    subprocess.run([*command, str(folder / "venv")], check=True)
    return Environment(folder / "venv", folder)
