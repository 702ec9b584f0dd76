"""Where pods run, who schedules them, and the labels and annotations that other programs read."""

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
            "tinkercloud.dev/, ray.io/ and app.kubernetes.io/ are set here and by KubeRay, and the"
            " queue is queueName: name something else",
        ),
    ),
]
"""Labels that a BaseModel adds."""
Annotations = Annotated[
    dict[str, Annotated[str, Field(max_length=2048)]],
    Field(
        max_length=16,
        json_schema_extra=_keys(
            f"{_RESERVED} && key != 'cluster-autoscaler.kubernetes.io/safe-to-evict'"
            " && key != 'karpenter.sh/do-not-disrupt'",
            "tinkercloud.dev/, ray.io/, app.kubernetes.io/ and the marks against eviction are set"
            " here and by KubeRay: name something else",
        ),
    ),
]
"""Annotations that a BaseModel adds."""


class Toleration(Part):
    """A taint that pods accept."""

    key: LabelKey | None = None
    """The taint's key; absent means any."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How `value` is compared."""
    value: LabelValue | None = None
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; absent means any."""


class NodeRequirement(Part):
    """A term of required node affinity; all terms must hold."""

    key: LabelKey
    """The node label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = "In"
    """How it is compared."""
    values: Annotated[list[LabelValue], Field(default_factory=list, max_length=64)]
    """With what."""


class TopologyAffinity(Part):
    """Pods of a session that run near each other, such as in one rack or zone."""

    key: Annotated[str, Field(min_length=1, max_length=317)]
    """The node label whose value the nodes share, such as `topology.kubernetes.io/zone`."""
    enforcement: Literal["Required", "Preferred"] = "Required"
    """Whether pods wait for such nodes, or only prefer them."""


class RolePlacement(Part):
    """What pods of one role have instead of what `placement` says; absent fields are as there."""

    node_selector: Annotated[dict[str, LabelValue], Field(max_length=16)] | None = None
    """Labels a node must have."""
    node_affinity: Annotated[list[NodeRequirement], Field(max_length=16)] | None = None
    """Requirements a node must meet."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] | None = None
    """Taints the pods accept."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods."""
    topology_affinity: TopologyAffinity | None = None
    """Has pods of this role run near each other."""
    pod_labels: Labels | None = None
    """Labels of the pods."""
    pod_annotations: Annotations | None = None
    """Annotations of the pods."""


class Placement(Part):
    """Where pods may run."""

    node_selector: Annotated[dict[str, LabelValue], Field(default_factory=dict, max_length=16)]
    """Labels a node must have."""
    node_affinity: Annotated[list[NodeRequirement], Field(default_factory=list, max_length=16)]
    """Requirements a node must meet."""
    tolerations: Annotated[list[Toleration], Field(default_factory=list, max_length=16)]
    """Taints the pods accept."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""
    queue_name: ObjectName | None = None
    """Kueue LocalQueue that admits the sessions; absent means none."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods."""
    topology_affinity: TopologyAffinity | None = None
    """Has all pods of a session run near each other."""
    scheduler_name: ObjectName | None = None
    """The scheduler of the pods; absent means the cluster's default. One that places all pods of a
    session or none (Volcano, KAI, YuniKorn) finds what it wants in labels and annotations."""
    pod_labels: Labels | None = None
    """Labels of the pods."""
    pod_annotations: Annotations | None = None
    """Annotations of the pods, such as those of Kueue's topologies, or of further networks."""
    ray_cluster_labels: Labels | None = None
    """Labels of the RayCluster."""
    ray_cluster_annotations: Annotations | None = None
    """Annotations of the RayCluster."""

    def of_role(self, role: RolePlacement | None) -> "Placement":
        """Return the placement of one role's pods."""
        own = (
            {} if role is None else {name: getattr(role, name) for name in type(role).model_fields}
        )
        return self.model_copy(
            update={name: value for name, value in own.items() if value is not None}
        )
