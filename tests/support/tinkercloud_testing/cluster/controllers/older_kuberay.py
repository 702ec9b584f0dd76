"""The resource definitions of older versions of KubeRay, from the Go module proxy."""

import json
import runpy
import subprocess
from functools import cache
from pathlib import Path

from tinkercloud_testing.cluster.image_build.programs import BUILDER
from tinkercloud_testing.cluster.kube_api.client import Cluster

_MODULE = "github.com/ray-project/kuberay/ray-operator"
_SUMS = {
    "v1.4.2": "h1:A4tGzbIky8sInAUxZBdBb+rrpZ7fbqoxdsOtm559Zqg=",
    "v1.5.1": "h1:7FJYmB8oM+cnjv1VYCj/TfzRZG4XHvvt5Ayn5pZ5A1c=",
}
"""Versions, and their hashes in the format of go.sum."""


@cache
def _module(version: str) -> Path:
    go, _ = runpy.run_path(str(BUILDER))["find_go"]()
    command = [go, "mod", "download", "-json", f"{_MODULE}@{version}"]
    said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert said["Sum"] == _SUMS[version], f"another {version} than the one that is pinned"
    return Path(said["Dir"])


def install_older_definition(cluster: Cluster, version: str) -> None:
    """Replace the definition of RayClusters with that of an older KubeRay."""
    folder = _module(version) / "config" / "crd" / "bases"
    cluster.apply_text((folder / "ray.io_rayclusters.yaml").read_text())
    cluster.wait_until_established("rayclusters.ray.io")
