"""Images of our programs, assembled from this machine's Debian, Python and environment.

They stand in for those of the Dockerfile in `.ci/run`, because they need less disk and time.

Layers, lowest first: a minimal Debian; the interpreter; the dependencies of the API server and the
operator; further dependencies of the worker; our packages. The programs run as an unprivileged
user, need no writable root, and are started with `python -m`.
"""

import functools
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tinkercloud_testing.cluster.image_build.images import (
    USER,
    Image,
    Layer,
    LayerCache,
    add_bytes,
    add_folder,
    add_link,
    add_tree,
)
from tinkercloud_testing.cluster.image_build.programs import ROOT, layer_folder, system_tool

_LIGHT = ("tinkercloud-api[postgres,sdk,telemetry]", "tinkercloud-operator")
_WORKER = ("tinkercloud-worker[megatron,telemetry]",)
_RECIPES = ("tinkercloud-programs", "tinker-cookbook[math-rl]")
PROGRAMS: Mapping[str, tuple[str, Sequence[Sequence[str]]]] = {
    "api-server": ("tinkercloud_api", [_LIGHT]),
    "operator": ("tinkercloud_operator", [_LIGHT]),
    "worker": ("tinkercloud_worker", [_LIGHT, _WORKER]),
    # The cookbook imports torch, which the layer of the worker contains already.
    "programs": ("tinkercloud_programs.rlve", [_LIGHT, _WORKER, _RECIPES]),
}
"""The package that `python -m` runs and its dependencies, one layer each, by image name."""
_SYSTEM_TOOLS: Mapping[str, Sequence[str]] = {"programs": ["git"]}
"""Commands of this machine by image name. The cookbook's recipes record the state of their code."""
_VENV = "/opt/tinkercloud"
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_SITE = f"{_VENV}/lib/{_PYTHON}/site-packages"
_RECIPE = "4"
"""Part of every key: increase it when layers are filled differently."""
_NOT_NEEDED = frozenset(
    {"site-packages", "dist-packages", "test", "idlelib", "tkinter", "ensurepip"}
)
_GPU_LIBRARIES = "nvidia"
_GPU_COMPILERS = frozenset({"triton"})
_BASE_CLUTTER = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man")


def assembled_image(name: str, tree: Path = ROOT, tag: str = "test") -> Image:
    """Return the image of one of our programs, `tinkercloud.test/<name>:<tag>`.

    Args:
        name: A key of `PROGRAMS`.
        tree: The working tree whose packages it gets; all else is of this machine's environment.
        tag: Its tag.
    """
    package, imported = PROGRAMS[name]
    layers, present = [_base(), _interpreter()], dict[str, Distribution]()
    layers += map(_tool, _SYSTEM_TOOLS.get(name, ()))
    for roots in imported:
        needed = _closure(roots)
        layers.append(_libraries({key: needed[key] for key in needed if key not in present}))
        present |= needed
    return Image(
        f"tinkercloud.test/{name}:{tag}",
        [*layers, _commands(_closure(imported[-1])), _sources(tree)],
        {
            "User": f"{USER}:{USER}",
            "Entrypoint": [f"{_VENV}/bin/python", "-m", package],
            "Env": [f"PATH={_VENV}/bin:/usr/local/bin:/usr/bin:/bin", "HOME=/tmp"],
            "WorkingDir": "/",
        },
    )


def _cache() -> LayerCache:
    return LayerCache(layer_folder())


def _base() -> Layer:
    """Return the layer with a minimal installation of this machine's distribution."""
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]

    def fill(tar: tarfile.TarFile) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch) / "root"
            packages = "--include=ca-certificates"
            command = [system_tool("debootstrap"), "--variant=minbase", packages, suite, str(root)]
            subprocess.run(command, check=True, stdout=sys.stderr)
            with (root / "etc/passwd").open("a") as users:
                users.write(f"tinkercloud:x:{USER}:{USER}::/tmp:/usr/sbin/nologin\n")
            tar.add(root, ".", filter=_without_clutter)

    return _cache().layer(f"base {_RECIPE} {suite}", fill)


def _without_clutter(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    kept = not entry.name.removeprefix("./").startswith(_BASE_CLUTTER) and not entry.isdev()
    return entry if kept else None


def _interpreter() -> Layer:
    """Return the layer with this machine's Python, at the same path, and a virtual environment."""
    prefix = Path(sys.base_prefix)
    executable = (prefix / "bin" / _PYTHON).resolve()
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": str(prefix)}))

    def fill(tar: tarfile.TarFile) -> None:
        _add_parents(tar, executable)
        add_tree(tar, executable, str(executable))
        # These folders are only for C programs that embed Python.
        unneeded = _NOT_NEEDED | {path.name for path in library.glob("config-*")}
        add_tree(tar, library, str(library), without=unneeded)
        modules = (path.relative_to(library) for path in library.rglob("*.py"))
        needed = [library / path for path in modules if not unneeded & set(path.parts)]
        _add_compiled(tar, {path: str(path) for path in needed})
        _add_shared_libraries(tar, [executable, *library.glob("lib-dynload/*.so")])
        for name in ("python", "python3"):
            add_link(tar, f"{_VENV}/bin/{name}", str(executable))
        settings = f"home = {executable.parent}\ninclude-system-site-packages = false\n"
        add_bytes(tar, f"{_VENV}/pyvenv.cfg", settings.encode())

    return _cache().layer(f"python {_RECIPE} {prefix} {sys.version}", fill)


def _tool(name: str) -> Layer:
    """Return the layer with a command of this machine and the libraries that it loads."""
    executable = Path(system_tool(name)).resolve()

    def fill(tar: tarfile.TarFile) -> None:
        add_bytes(tar, str(executable), executable.read_bytes(), 0o755)
        _add_shared_libraries(tar, [executable])

    stamp = executable.stat().st_mtime_ns
    return _cache().layer(f"tool {_RECIPE} {executable} {stamp}", fill)


def _add_parents(tar: tarfile.TarFile, path: Path) -> None:
    """Make all parent folders of a file accessible: one may be the home folder of root."""
    for parent in reversed(path.parents[:-1]):
        add_folder(tar, str(parent))


def _add_shared_libraries(tar: tarfile.TarFile, programs: Iterable[Path]) -> None:
    for path in _shared_libraries(programs):
        add_bytes(tar, str(path.parent.resolve() / path.name), path.read_bytes(), 0o755)


def _shared_libraries(programs: Iterable[Path]) -> list[Path]:
    """Return the libraries that programs load, without those of the C library."""
    command = [system_tool("ldd"), *map(str, programs)]
    said = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    found = {Path(path) for path in re.findall(r"=> (/\S+)", said)}
    own = re.compile(r"(libc|libm|libdl|libpthread|librt|libutil|ld-linux.*)\.so")
    return sorted(path for path in found if not own.match(path.name))


def _libraries(distributions: Mapping[str, Distribution]) -> Layer:
    """Return the layer with installed third-party distributions."""
    names = [f"{name}=={found.version}" for name, found in sorted(distributions.items())]

    def fill(tar: tarfile.TarFile) -> None:
        files = _files(distributions.values())
        for path, target in files.items():
            add_tree(tar, path, target)
        _add_compiled(tar, {path: files[path] for path in files if path.suffix == ".py"})

    return _cache().layer(f"libraries {_RECIPE} {_PYTHON} {' '.join(names)}", fill)


def _commands(distributions: Mapping[str, Distribution]) -> Layer:
    """Return the layer with the commands of distributions, such as `ray`."""
    scripts = {
        point.name: f"#!{_VENV}/bin/python\nimport sys\nfrom {point.module} import {point.attr}\n"
        f"sys.exit({point.attr}())\n"
        for found in distributions.values()
        for point in found.entry_points.select(group="console_scripts")
    }

    def fill(tar: tarfile.TarFile) -> None:
        for name, script in sorted(scripts.items()):
            add_bytes(tar, f"{_VENV}/bin/{name}", script.encode(), 0o755)

    return _cache().layer(f"commands {_RECIPE} {sorted(scripts.items())}", fill)


def _files(distributions: Iterable[Distribution]) -> dict[Path, str]:
    """Return the files of distributions and their paths in an image."""
    loaded = _loaded_without_gpu()
    files = {}
    for file in (file for found in distributions for file in found.files or ()):
        path = Path(str(file.locate()))
        idle = file.parts[0] == _GPU_LIBRARIES and str(path) not in loaded
        if not idle and not {"..", "__pycache__"} & set(file.parts):
            files[path] = f"{_SITE}/{file}"
    return files


def _add_compiled(tar: tarfile.TarFile, modules: Mapping[Path, str]) -> None:
    """Add the bytecode of modules: a read-only pod would compile them at every start.

    Args:
        tar: The archive.
        modules: Modules and their paths in the image.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for path, target in modules.items():
            copy = Path(scratch + target)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        command = [sys.executable, "-m", "compileall", "-qq", "-j0", "-s", scratch, "-p", "/"]
        # Some distributions contain templates that are not valid modules and do not compile.
        subprocess.run([*command, "--invalidation-mode=unchecked-hash", scratch], check=False)
        for compiled in Path(scratch).rglob("*.pyc"):
            add_bytes(tar, str(compiled.relative_to(scratch)), compiled.read_bytes())


def _loaded_without_gpu() -> frozenset[str]:
    """Return the paths of the libraries that torch loads on a CPU.

    Its CUDA build needs some gigabytes of libraries even there, but not all of them.
    """
    script = "import torch; print(open('/proc/self/maps').read())"
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    return frozenset(line.split()[-1] for line in said.decode().splitlines() if "/" in line)


@functools.cache
def _sources(tree: Path) -> Layer:
    """Return the layer with our own packages from a working tree."""
    packages = sorted(tree.glob("*/src/tinkercloud_*"))
    files = [path for package in packages for path in sorted(package.rglob("*")) if path.is_file()]
    content = hashlib.sha256()
    for path in files:
        if "__pycache__" not in path.parts:
            content.update(f"{path.relative_to(tree)}\n".encode() + path.read_bytes())

    def fill(tar: tarfile.TarFile) -> None:
        for package in packages:
            add_tree(tar, package, f"{_SITE}/{package.name}")
            # Programs read their version from it.
            found = distribution(package.name.replace("_", "-"))
            folder = f"{_SITE}/{package.name}-{found.version}.dist-info"
            add_bytes(tar, f"{folder}/METADATA", (found.read_text("METADATA") or "").encode())

    return _cache().layer(f"sources {_RECIPE} {_PYTHON} {content.hexdigest()}", fill)


def _closure(roots: Iterable[str]) -> dict[str, Distribution]:
    """Return the third-party distributions that roots need on a CPU, by normalised name.

    Requirements that are not installed are left out, because the environment works without them.
    """
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                found[name] = distribution(name)
            except PackageNotFoundError:
                continue
            waiting += _requirements(found[name], extra)
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("tinkercloud") and name not in _GPU_COMPILERS
    }


def _requirements(found: Distribution, extra: str) -> list[Requirement]:
    requirements = [Requirement(text) for text in found.requires or ()]
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})]
