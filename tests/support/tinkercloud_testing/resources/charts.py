"""What Helm makes of the charts."""

import functools
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tinkercloud_testing.cluster.image_build.programs import binary

ROOT = Path(__file__).parents[4]
CHART = ROOT / "charts" / "tinkercloud"
CRD_CHART = ROOT / "charts" / "tinkercloud-crds"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
"""Values to start from, one file for each situation."""
CASES = [*sorted((CHART / "ci").glob("*.yaml")), *EXAMPLES]
"""Values that people have; each must render."""
NAMESPACE = "research"
VERSION = str(yaml.safe_load((CHART / "Chart.yaml").read_text())["version"])

Manifest = dict[str, Any]


class HelmFailed(Exception):
    """Helm refused; the message is what it wrote."""


def helm(*arguments: str) -> str:
    """Run Helm and return what it printed.

    Raises:
        HelmFailed: It failed.
    """
    result = subprocess.run(
        [str(binary("helm")), *arguments], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise HelmFailed(result.stdout + result.stderr)
    return result.stdout


@functools.cache
def template(*options: str) -> str:
    """Return the chart's manifests, hooks included, for `--values` and `--set` options.

    Raises:
        HelmFailed: The values are not acceptable.
    """
    return helm("template", "tinker", str(CHART), "--namespace", NAMESPACE, *options)


def objects(*options: str) -> Sequence[Manifest]:
    """Return the chart's objects."""
    return [found for found in yaml.safe_load_all(template(*options)) if found is not None]


def of_kind(kind: str, *options: str) -> Sequence[Manifest]:
    """Return the chart's objects of a kind."""
    return [found for found in objects(*options) if found["kind"] == kind]


def one(kind: str, name: str, *options: str) -> Manifest:
    """Return an object by kind and name."""
    (found,) = (each for each in of_kind(kind, *options) if each["metadata"]["name"] == name)
    return found


def pod_specs(*options: str) -> Iterator[tuple[str, Manifest]]:
    """Yield the specification of every pod that the chart makes, with its maker's name."""
    for found in objects(*options):
        name = f"{found['kind']} {found['metadata']['name']}"
        if found["kind"] == "Pod":
            yield name, found["spec"]
        elif found["kind"] in {"Deployment", "Job"}:
            yield name, found["spec"]["template"]["spec"]


def environment(deployment: Manifest) -> dict[str, str]:
    """Return the environment of a deployment's container; what comes from elsewhere is ''."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}
