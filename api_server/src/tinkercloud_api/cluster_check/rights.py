"""The permissions that an installation of the chart needs: pure.

Kubernetes only lets a user create a Role whose permissions the user has too, or who may escalate
and bind roles.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tinkercloud_crds import labels

_OWN = f"{labels.GROUP}/"
_FOLLOW = "list watch"
_MANAGE = "list watch create patch delete"


@dataclass(frozen=True, slots=True)
class Right:
    """A permission of the user."""

    verb: str
    group: str
    """API group; empty for the core group."""
    resource: str
    """Plural, with a subresource such as `pods/log`."""
    is_cluster_wide: bool = False

    def __str__(self) -> str:
        resource, _, subresource = self.resource.partition("/")
        plural = f"{resource}.{self.group}" if self.group else resource
        return f"{self.verb} {plural}" + (f"/{subresource}" if subresource else "")

    def review(self, namespace: str) -> Mapping[str, Any]:
        """Return the SelfSubjectAccessReview of this right."""
        resource, _, subresource = self.resource.partition("/")
        attributes = {
            "verb": self.verb,
            "group": self.group,
            "resource": resource,
            "subresource": subresource,
        }
        if not self.is_cluster_wide:
            attributes["namespace"] = namespace
        return {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }


_CREATED = (
    "secrets",
    "serviceaccounts",
    "services",
    "pods",
    "apps/deployments",
    "batch/jobs",
    "coordination.k8s.io/leases",
    "rbac.authorization.k8s.io/rolebindings",
    "rbac.authorization.k8s.io/roles",
)
"""What every release creates. Pods and Jobs are those of Helm's hooks."""
_NODE_ROLES = (
    "rbac.authorization.k8s.io/clusterrolebindings",
    "rbac.authorization.k8s.io/clusterroles",
)
_GRANTED: Mapping[str, str] = {
    f"{_OWN}trainingsessions": f"get {_MANAGE}",
    f"{_OWN}trainingsessions/status": "patch",
    f"{_OWN}basemodels": f"{_FOLLOW} patch",
    f"{_OWN}basemodels/status": "patch",
    f"{_OWN}tenants": _FOLLOW,
    f"{_OWN}tenants/status": "patch",
    "ray.io/rayclusters": _MANAGE,
    "pods": _FOLLOW,
    "pods/log": "get",
    "services": _MANAGE,
    "configmaps": _MANAGE,
    "secrets": "get create",
    "networking.k8s.io/networkpolicies": _MANAGE,
    "policy/poddisruptionbudgets": _MANAGE,
    "batch/jobs": _MANAGE,
    "resource.k8s.io/resourceclaimtemplates": _MANAGE,
    "events": "create",
    "coordination.k8s.io/leases": "get list watch update patch",
}
"""Permissions of the Roles in the chart (templates/rbac.yaml)."""
ESCALATION = frozenset(
    Right(verb, "rbac.authorization.k8s.io", "roles") for verb in ("escalate", "bind")
)
"""With both, a user may create Roles with any permissions."""
DEFINITIONS = Right("create", "apiextensions.k8s.io", "customresourcedefinitions", True)  # noqa: FBT003 - a field


def created(values: Mapping[str, Any]) -> Iterator[Right]:
    """Yield the rights to create the objects of a release.

    Args:
        values: the values of the release, defaults included.
    """
    resources = [*_CREATED, *_optional(values)]
    yield from (_right("create", resource) for resource in resources)
    if values["operator"]["readNodes"]:
        yield from (_right("create", resource, is_cluster_wide=True) for resource in _NODE_ROLES)


def granted(values: Mapping[str, Any]) -> Iterator[Right]:
    """Yield the permissions of the roles that a release creates."""
    for resource, verbs in _GRANTED.items():
        yield from (_right(verb, resource) for verb in verbs.split())
    if values["operator"]["readNodes"]:
        yield from (_right(verb, "nodes", is_cluster_wide=True) for verb in _FOLLOW.split())


def _optional(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the resources that a release with these values creates in addition."""
    api, metrics = values["apiServer"], values["metrics"]
    has_several = api["replicas"] > 1 or api["autoscaling"]["enabled"]
    wanted = {
        "persistentvolumeclaims": True,
        "networking.k8s.io/networkpolicies": values["networkPolicy"]["enabled"],
        "policy/poddisruptionbudgets": values["operator"]["replicas"] > 1 or has_several,
        "autoscaling/horizontalpodautoscalers": api["autoscaling"]["enabled"],
        "networking.k8s.io/ingresses": values["ingress"]["enabled"],
        "gateway.networking.k8s.io/httproutes": values["httpRoute"]["enabled"],
        "configmaps": metrics["dashboards"]["enabled"],
        "monitoring.coreos.com/servicemonitors": metrics["serviceMonitor"]["enabled"],
        "monitoring.coreos.com/podmonitors": metrics["serviceMonitor"]["enabled"],
        "monitoring.coreos.com/prometheusrules": metrics["prometheusRule"]["enabled"],
        f"{_OWN}basemodels": values["baseModels"],
    }
    yield from (resource for resource, is_wanted in wanted.items() if is_wanted)


def _right(verb: str, resource: str, *, is_cluster_wide: bool = False) -> Right:
    """Return a right from `GROUP/RESOURCE[/SUB]`, or `RESOURCE[/SUB]` of the core group."""
    group, _, rest = resource.partition("/")
    is_core = "." not in group and group not in {"apps", "batch", "policy", "autoscaling"}
    if is_core:
        return Right(verb, "", resource, is_cluster_wide)
    return Right(verb, group, rest, is_cluster_wide)


def named(rights: Iterable[Right]) -> str:
    """Return rights as text, with the verbs of a resource together."""
    verbs: dict[str, list[str]] = {}
    for each in sorted(rights, key=lambda right: (right.group, right.resource, right.verb)):
        verb, _, plural = str(each).partition(" ")
        verbs.setdefault(plural, []).append(verb)
    return "; ".join(f"{', '.join(each)} {plural}" for plural, each in verbs.items())
