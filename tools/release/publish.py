"""Publish the images, bills of materials and charts of this commit to a registry, by digest.

    python tools/release/publish.py REGISTRY [--targets api-server operator ...] [--plain-http]
        [--layout FOLDER]

REGISTRY is a host and a path, such as ghcr.io/example. `make images` must have built the images, or
FOLDER be an OCI layout with them, and `make sbom` their bills of materials. Log in with `skopeo
login`, `helm registry login` and `oras login`. The charts name the registry and the digests of the
images, so that an installation needs neither a tag nor a value for them. Everything is written to
build/release too:

- `tinkercloud-<version>.tgz`, `tinkercloud-crds-<version>.tgz`: the charts,
- `release.json`: each image and chart with its digest.

Repeating it pushes what is missing.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "release"
TARGETS = ("api-server", "operator", "programs", "worker-cpu", "recipes", "worker")
ORAS = "oras.land/oras/cmd/oras@v1.3.0"
_SBOM = "application/vnd.cyclonedx+json"


def main(arguments: Sequence[str]) -> None:
    """Publish everything, and print what was published."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("registry", help="host and path, such as ghcr.io/example")
    parser.add_argument("--plain-http", action="store_true", help="the registry has no TLS")
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="of the Dockerfile")
    parser.add_argument("--layout", type=Path, help="an OCI layout that has the images")
    chosen = parser.parse_args(arguments)
    OUT.mkdir(parents=True, exist_ok=True)
    registry = Registry(chosen.registry, chosen.layout, is_plain=chosen.plain_http)
    digests = {target: registry.push_image(target) for target in chosen.targets}
    for target, digest in digests.items():
        registry.attach_sbom(target, digest)
    charts = {
        name: registry.push_chart(name, path)
        for name, path in packaged(chosen.registry, digests).items()
    }
    images = {
        target: f"{chosen.registry}/{repository(target)}@{digest}"
        for target, digest in digests.items()
    }
    release = {"version": version(), "images": images, "charts": charts}
    (OUT / "release.json").write_text(json.dumps(release, indent=2) + "\n")
    for name, reference in {**images, **charts}.items():
        sys.stdout.write(f"{name:24} {reference}\n")


def version() -> str:
    """Return the version of this tree."""
    text = (ROOT / "charts/tinkercloud/Chart.yaml").read_text()
    return _found(r"^version: (.+)$", text)


def repository(target: str) -> str:
    """Return the repository of the image of a target, below the registry."""
    return f"tinkercloud-{'api' if target == 'api-server' else target}"


class Registry:
    """A registry that images, charts and other artifacts are pushed to."""

    def __init__(self, address: str, layout: Path | None, *, is_plain: bool) -> None:
        """Connect to nothing yet.

        Args:
            address: its host and a path.
            layout: an OCI layout that has the images; without one, buildah's storage has them.
            is_plain: whether it speaks HTTP.
        """
        self._address = address
        self._layout = layout
        self._is_plain = is_plain

    def push_image(self, target: str) -> str:
        """Push an image, and return its digest. Layers of a layout are not compressed."""
        name = f"{repository(target)}:{version()}"
        if self._layout is None:
            storage = run(str(ROOT / "tools/images/build.sh"), "--storage").strip()
            source = [f"containers-storage:[{storage}]localhost/{name}"]
        else:
            source = ["--preserve-digests", f"oci:{self._layout}:{target}"]
        written = OUT / f"{target}.digest"
        run(
            *("skopeo", "copy", "--quiet", f"--digestfile={written}"),
            f"--dest-tls-verify={'false' if self._is_plain else 'true'}",
            *source,
            f"docker://{self._address}/{name}",
        )
        return written.read_text().strip()

    def attach_sbom(self, target: str, digest: str) -> None:
        """Attach the bill of materials of an image to its digest, as an artifact of its own."""
        name = f"tinkercloud-{target}.cdx.json"
        run(
            *("go", "run", ORAS, "attach", f"--artifact-type={_SBOM}"),
            *(["--plain-http"] if self._is_plain else []),
            f"{self._address}/{repository(target)}@{digest}",
            f"{name}:{_SBOM}",
            folder=ROOT / "build" / "sbom",
        )

    def push_chart(self, name: str, path: Path) -> str:
        """Push a packaged chart, and return its reference with its digest."""
        said = run(
            *(helm(), "push", str(path), f"oci://{self._address}/charts"),
            *(["--plain-http"] if self._is_plain else []),
        )
        return f"oci://{self._address}/charts/{name}@{_found(r'^Digest: (sha256:.+)$', said)}"


def packaged(registry: str, digests: Mapping[str, str]) -> dict[str, Path]:
    """Package both charts by name; the one of the service names its images by digest."""
    made = {}
    for chart in (ROOT / "charts/tinkercloud-crds", ROOT / "charts/tinkercloud"):
        copy = OUT / "charts" / chart.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(chart, copy)
        if (copy / "values.yaml").exists():
            values = (copy / "values.yaml").read_text()
            (copy / "values.yaml").write_text(pinned(values, registry, digests))
        run(helm(), "package", str(copy), f"--destination={OUT}")
        made[chart.name] = OUT / f"{chart.name}-{version()}.tgz"
    return made


def pinned(values: str, registry: str, digests: Mapping[str, str]) -> str:
    """Return the default values of the chart with a registry and the digests of its images.

    Comments stay, because `helm show values` prints them.

    Raises:
        ValueError: the values have no such lines.
    """
    changed = _replaced(r"(?m)^  registry: ''$", f"  registry: {registry}", values)
    for target in ("api-server", "operator"):
        image = rf"(?m)^(    repository: {repository(target)}\n(?:    .*\n)*?    digest:) ''$"
        changed = _replaced(image, rf"\1 {digests[target]}", changed)
    return changed


def helm() -> str:
    """Return the path of Helm, built if need be."""
    folder = run(sys.executable, str(ROOT / "tools/cluster/build.py"), "helm").splitlines()[-1]
    return str(Path(folder, "bin", "helm"))


def run(*command: str, folder: Path = ROOT) -> str:
    """Run a command and return what it printed, including errors.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(  # noqa: S603 - every command is written above
        command,
        cwd=folder,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def _replaced(pattern: str, replacement: str, text: str) -> str:
    changed, count = re.subn(pattern, replacement, text, count=1)
    if not count:
        raise ValueError(f"the values of the chart have no line like {pattern!r}")
    return changed


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise ValueError(f"no line like {pattern!r} in:\n{text}")
    return found[1]


if __name__ == "__main__":
    main(sys.argv[1:])
