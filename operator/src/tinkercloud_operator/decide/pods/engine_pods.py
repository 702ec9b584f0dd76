"""The number of engine pods of a session whose engines follow the load: pure.

The RayCluster is the record of how many engines exist: the groups of the others have no replicas.
The head says how many it needs (`tinkercloud_protocol.heads.engine_scaling_settings`); fewer only
when it no longer uses the surplus ones.
"""

from tinkercloud_crds import labels
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.spec.observed import Observed
from tinkercloud_operator.spec.resolved import ResolvedSpec

_SAMPLER = "sampler"


def engine_pods(observed: Observed, resolved: ResolvedSpec) -> int:
    """Return how many engine pods a session should have now."""
    needed = observed.answers.engines_needed
    wanted = existing_engines(observed.ray_cluster) if needed is None else needed
    return min(max(wanted, resolved.samplers), resolved.most_samplers)


def existing_engines(ray_cluster: Manifest | None) -> int:
    """Return how many engine pods a RayCluster should have; 0 if there is no RayCluster."""
    return sum(bool(group.get("replicas")) for group in _groups(ray_cluster))


def is_scaled(ray_cluster: Manifest | None) -> bool:
    """Return whether the number of a RayCluster's engines follows the load."""
    return any(labels.SCALED_LABEL in _labels(group) for group in _groups(ray_cluster))


def _groups(ray_cluster: Manifest | None) -> list[Manifest]:
    """Return the groups of engines that have pods of their own."""
    groups: list[Manifest] = (ray_cluster or {}).get("spec", {}).get("workerGroupSpecs", [])
    return [group for group in groups if _labels(group).get(labels.COMPONENT_LABEL) == _SAMPLER]


def _labels(group: Manifest) -> Manifest:
    found: Manifest = group.get("template", {}).get("metadata", {}).get("labels", {})
    return found
