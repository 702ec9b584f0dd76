"""The result of a check, and what was read of a cluster: plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tinkercloud_api.cluster_check.rights import Right
from tinkercloud_crds.served_schemas import Schema
from tinkercloud_kube.objects import Manifest


class Level(StrEnum):
    """How good the result of a check is."""

    OK = "ok"
    WARNING = "warning"
    """The service may work, but somebody should look at it, or the check could not look."""
    PROBLEM = "problem"
    """The installation, or sessions, will fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    level: Level
    detail: str
    remedy: str = ""
    """What to do, in one sentence; empty if there is nothing to do."""

    def as_row(self) -> dict[str, str]:
        """Return the result as a table row."""
        return {
            "check": self.check,
            "result": self.level.value,
            "detail": self.detail,
            "remedy": self.remedy,
        }


Listed = Sequence[Manifest] | None
"""Objects of a kind; None if the user may not list them."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What was read of a cluster and of the namespace of a release."""

    url: str
    """URL of the Kubernetes API server."""
    version: str
    """Version of the Kubernetes API server, such as `v1.36.4`."""
    apis: frozenset[str]
    """APIs that are served, such as `apis/ray.io/v1`."""
    schemas: Mapping[str, Schema]
    """Schemas of RayCluster and of our own kinds, as far as they are served."""
    namespace: str
    namespaces: Listed
    """The namespace; empty if it does not exist."""
    nodes: Listed
    storage_classes: Listed
    operators: Listed
    """Deployments of KubeRay's operator, in all namespaces."""
    deployments: Listed
    """Deployments of the namespace; likewise below."""
    pods: Listed
    claims: Listed
    """PersistentVolumeClaims."""
    queues: Listed
    """LocalQueues of Kueue; empty if their API is not served."""
    secrets: Mapping[str, frozenset[str] | None]
    """Keys of each Secret that the values name, without those that do not exist; None if the user
    may not read it."""
    config_maps: Mapping[str, frozenset[str] | None]
    """Likewise of each ConfigMap."""
    denied: frozenset[Right]
    """Rights of an installation that the user does not have."""


def not_permitted(check: str, what: str) -> Finding:
    """Return the result of a check that could not look."""
    return Finding(
        check,
        Level.WARNING,
        f"not permitted to read {what}, so this was not checked",
        "repeat the check as an administrator of the cluster",
    )
