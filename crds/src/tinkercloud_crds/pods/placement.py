"""Where pods run, which scheduler places them, and the labels and annotations they carry."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tinkercloud_crds.structural import Part, rules

ObjectName = Annotated[
    str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9][-a-z0-9]*)*$")
]
LabelValue = Annotated[
    str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
]
LabelKey = Annotated[str, Field(max_length=317)]

_RESERVED = (
    "!key.startsWith('tinkercloud.dev/') && !key.startsWith('ray.io/')"
    " && !key.startsWith('app.kubernetes.io/')"
)


def _keys(allowed: str, message: str) -> dict[str, Any]:
    return rules((f"self.all(key, {allowed})", message))


Labels = Annotated[
    dict[str, LabelValue],
    Field(
        max_length=16,
        json_schema_extra=_keys(
            f"{_RESERVED} && key != 'kueue.x-k8s.io/queue-name'",
            "keys under tinkercloud.dev/, ray.io/ and app.kubernetes.io/ are reserved for"
            " Tinkercloud and KubeRay; use another key, or queueName to set the queue",
        ),
    ),
]
"""Labels that a BaseModel adds to its objects."""
Annotations = Annotated[
    dict[str, Annotated[str, Field(max_length=2048)]],
    Field(
        max_length=16,
        json_schema_extra=_keys(
            f"{_RESERVED} && key != 'cluster-autoscaler.kubernetes.io/safe-to-evict'"
            " && key != 'karpenter.sh/do-not-disrupt'",
            "keys under tinkercloud.dev/, ray.io/ and app.kubernetes.io/, and the annotations"
            " cluster-autoscaler.kubernetes.io/safe-to-evict and karpenter.sh/do-not-disrupt, are"
            " reserved for Tinkercloud and KubeRay; use another key",
        ),
    ),
]
"""Annotations that a BaseModel adds to its objects."""


class Toleration(Part):
    """A taint that the pods tolerate."""

    key: LabelKey | None = None
    """Key of the taint. If unset, the toleration matches all keys."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Operator to compare `value` with the taint's value."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. If unset, the toleration matches all effects."""


class NodeRequirement(Part):
    """One term of required node affinity. All terms must match."""

    key: LabelKey
    """Key of the node label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = "In"
    """Operator to compare the label with `values`."""
    values: Annotated[list[LabelValue], Field(default_factory=list, max_length=64)]
    """Values to compare the label with."""


class TopologyAffinity(Part):
    """Schedules pods in the same topology domain, such as a rack or a zone."""

    key: Annotated[str, Field(min_length=1, max_length=317)]
    """Node label whose value identifies the domain, such as `topology.kubernetes.io/zone`."""
    enforcement: Literal["Required", "Preferred"] = "Required"
    """`Required`: pods stay pending until they can be scheduled in the same domain. `Preferred`:
    pods may be scheduled in other domains if there is no capacity."""


class RolePlacement(Part):
    """Overrides of `placement` for the pods of one role. Unset fields are inherited."""

    node_selector: Annotated[dict[str, LabelValue], Field(max_length=16)] | None = None
    """Labels that a node must have."""
    node_affinity: Annotated[list[NodeRequirement], Field(max_length=16)] | None = None
    """Requirements that a node must meet."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] | None = None
    """Taints that the pods tolerate."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods."""
    topology_affinity: TopologyAffinity | None = None
    """Schedules the pods of this role in the same topology domain."""
    pod_labels: Labels | None = None
    """Labels to add to the pods."""
    pod_annotations: Annotations | None = None
    """Annotations to add to the pods."""


class Placement(Part):
    """Where the pods of a session may run."""

    node_selector: Annotated[dict[str, LabelValue], Field(default_factory=dict, max_length=16)]
    """Labels that a node must have."""
    node_affinity: Annotated[list[NodeRequirement], Field(default_factory=list, max_length=16)]
    """Requirements that a node must meet."""
    tolerations: Annotated[list[Toleration], Field(default_factory=list, max_length=16)]
    """Taints that the pods tolerate."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""
    queue_name: ObjectName | None = None
    """Kueue LocalQueue that sessions are submitted to. If unset, sessions are not queued."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods."""
    topology_affinity: TopologyAffinity | None = None
    """Schedules all pods of a session in the same topology domain."""
    scheduler_name: ObjectName | None = None
    """Name of the scheduler. If unset, the cluster's default scheduler is used. Use the labels and
    annotations below to configure gang schedulers (Volcano, KAI, YuniKorn)."""
    pod_labels: Labels | None = None
    """Labels to add to the pods."""
    pod_annotations: Annotations | None = None
    """Annotations to add to the pods, such as Kueue topology requests or additional networks."""
    ray_cluster_labels: Labels | None = None
    """Labels to add to the RayCluster."""
    ray_cluster_annotations: Annotations | None = None
    """Annotations to add to the RayCluster."""

    def of_role(self, role: RolePlacement | None) -> "Placement":
        """Return the placement of the pods of one role."""
        own = (
            {} if role is None else {name: getattr(role, name) for name in type(role).model_fields}
        )
        return self.model_copy(
            update={name: value for name, value in own.items() if value is not None}
        )
