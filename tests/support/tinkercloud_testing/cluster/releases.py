"""Releases in a registry of this machine, from which nodes pull and Helm installs."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tinkercloud_testing.cluster.image_build.program_images import TARGETS
from tinkercloud_testing.cluster.image_build.programs import ROOT, Program, system_tool
from tinkercloud_testing.cluster.nodes.node_config import REGISTRY
from tinkercloud_testing.resources.charts import CHART, CRD_CHART

_SETTINGS = """
version: 0.1
storage:
  filesystem: {{rootdirectory: {folder}}}
http:
  addr: {address}
"""


@dataclass(frozen=True)
class Release:
    """What a release consists of."""

    images: Mapping[str, str]
    """References by target of the Dockerfile."""
    charts: Mapping[str, Sequence[str]]
    """Arguments of `helm install` by name."""
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of the chart without which it would not find its images."""

    def image(self, name: str) -> str:
        """Return the reference of an image by its name in `TARGETS`."""
        return self.images[TARGETS[name]]


def unpublished(tag: str, *charts: Path) -> Release:
    """Return charts of a tree, and images with a tag that a test loads onto nodes."""
    return Release(
        {target: f"tinkercloud.test/{name}:{tag}" for name, target in TARGETS.items()},
        {chart.name: [str(chart)] for chart in charts},
        {
            "apiServer": {"image": {"repository": "tinkercloud.test/api-server", "tag": tag}},
            "operator": {"image": {"repository": "tinkercloud.test/operator", "tag": tag}},
        },
    )


UNPUBLISHED = unpublished("test", CHART, CRD_CHART)
"""The release of this tree."""


@contextlib.contextmanager
def a_registry(folder: Path) -> Iterator[None]:
    """Run an empty registry at an address that only this machine and its nodes reach.

    Args:
        folder: where it keeps what is pushed: the size of all images.
    """
    settings = folder / "registry.yaml"
    settings.write_text(_SETTINGS.format(folder=folder / "registry", address=REGISTRY))
    command = (system_tool("docker-registry"), "serve", str(settings))
    server = Program("registry", command, folder / "registry.log", _answers)
    server.start()
    try:
        yield
    finally:
        server.stop()


def publish(tree: Path, *options: str) -> Release:
    """Push images and charts of a working tree to the registry, as a release does.

    Args:
        tree: the root of the working tree.
        options: of `tools/release/publish.py`.

    Raises:
        subprocess.CalledProcessError: a step failed.
    """
    publisher = (sys.executable, str(tree / "tools/release/publish.py"))
    command = (*publisher, f"{REGISTRY}/tinkercloud", "--plain-http", *options)
    subprocess.run(command, cwd=tree, check=True, stdout=sys.stderr)
    found = json.loads((tree / "build/release/release.json").read_text())
    charts = {name: (reference, "--plain-http") for name, reference in found["charts"].items()}
    return Release(found["images"], charts)


def tree_of(commit: str, tree: Path) -> Path:
    """Check out a commit in a new folder, and return it."""
    git = system_tool("git")
    subprocess.run([git, "clone", "--quiet", "--no-checkout", ROOT, tree], check=True)
    subprocess.run([git, "checkout", "--quiet", commit], cwd=tree, check=True)
    return tree


def _answers() -> bool:
    with contextlib.suppress(OSError), urlopen(f"http://{REGISTRY}/v2/", timeout=5) as answer:
        return bool(answer.status == 200)
    return False
