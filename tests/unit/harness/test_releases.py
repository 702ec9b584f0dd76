"""The table of what a release needs agrees with the sources of this release."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tinkercloud_api.cluster_check import platform
from tinkercloud_crds.served_schemas import KUBERAY_MINIMUM

ROOT = Path(__file__).parents[3]
RELEASES = yaml.safe_load((ROOT / "tools" / "compatibility" / "releases.yaml").read_text())
NEEDS = {need["name"].partition(" (")[0]: need for need in RELEASES[0]["needs"]}


def pinned(folder: str, module: str) -> str:
    """Return the version of a program of the test cluster, without its `v`."""
    text = (ROOT / "tools" / "cluster" / folder / "go.mod").read_text()
    [version] = re.findall(rf"^\t{re.escape(module)} v([0-9.]+) ", text, re.MULTILINE)
    return str(version)


def need(name: str) -> dict[str, Any]:
    found: dict[str, Any] = NEEDS[name]
    return found


def test_the_newest_entry_is_of_the_version_of_the_packages() -> None:
    project = tomllib.loads((ROOT / "api_server" / "pyproject.toml").read_text())["project"]

    assert RELEASES[0]["release"] == project["version"]
    assert len({each["release"] for each in RELEASES}) == len(RELEASES)


def test_tested_versions_are_those_of_the_test_cluster() -> None:
    assert need("Kubernetes")["tested"] == pinned("kube", "k8s.io/kubernetes")
    kuberay = pinned("kuberay", "github.com/ray-project/kuberay/ray-operator")
    assert need("KubeRay")["tested"].startswith(f"{kuberay};")
    assert need("Kueue")["tested"] == pinned("kueue", "sigs.k8s.io/kueue")
    assert need("Helm")["tested"] == pinned("helm", "helm.sh/helm/v4")


def test_accepted_versions_are_those_that_the_check_of_a_cluster_accepts() -> None:
    minimum = f"1.{platform.KUBERNETES_MINIMUM}"
    assert need("Kubernetes")["accepted"] == f"{minimum} or newer"
    assert need("KubeRay")["accepted"] == f"{KUBERAY_MINIMUM} or newer"
    assert need("NVIDIA driver")["accepted"].startswith(f"{platform.DRIVER_MINIMUM} or newer")


def test_the_sdk_versions_are_those_of_the_results() -> None:
    versions = list(json.loads((ROOT / "docs" / "compatibility.json").read_text())["versions"])

    assert need("Tinker SDK")["accepted"] == f"{versions[0]} to {versions[-1]}"
