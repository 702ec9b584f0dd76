"""What the operator has seen of one TrainingSession: plain data, without I/O.

Everything that `reconcile` decides by is here, the time included.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import Reason
from tinkercloud_crds.training_session import TrainingSessionSpec, TrainingSessionStatus

Manifest = Mapping[str, Any]
"""A Kubernetes object as JSON."""

SaveKey = tuple[str, str]
"""What a head was asked to do, and its incarnation."""


@dataclass(frozen=True, slots=True)
class ChildKey:
    """Names a child of a session; all live in its namespace."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class PodProblem:
    """Why a pod does not run."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of a session."""

    name: str
    uid: str
    component: str
    """`head`, `trainer` or `sampler`."""
    is_scheduled: bool
    is_started: bool
    """Whether its container has passed its startup probe."""
    is_ready: bool
    is_terminating: bool
    restarts: int
    problem: PodProblem | None
    node: str | None = None
    """Where it runs."""
    tolerates_cordon: bool = False
    """Whether it may be placed on a node that takes no more pods."""
    finalizers: tuple[str, ...] = ()
    due: datetime | None = None
    """When it should be gone, if it is being deleted: the end of its grace period."""

    @property
    def incarnation(self) -> str:
        """Differs between any two processes that ever ran in it."""
        return f"{self.uid}-{self.restarts}"


@dataclass(frozen=True, slots=True)
class Node:
    """What one node can hold at most, and what it asks of pods."""

    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...]
    cpu: float
    """Cores."""
    memory: float
    """Bytes."""
    devices: Mapping[str, float]
    """GPUs, extended resources and huge pages (bytes), by the name of the resource."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One TrainingSession, its children, its surroundings and the clock."""

    name: str
    namespace: str
    uid: str
    generation: int
    created: datetime
    deleted: datetime | None
    """When its deletion was asked for."""
    has_finalizer: bool
    is_declared: bool
    """Whether a person or a GitOps tool made it, rather than the API server for a client."""
    spec: TrainingSessionSpec
    status: TrainingSessionStatus
    last_activity: datetime | None
    """When a client last used it, as the API server has noted."""
    base_model: BaseModelSpec | None
    """The BaseModel of its `spec.baseModel`, if there is one."""
    sessions_of_owner: int
    """Live sessions of its owner and BaseModel that are older than this one."""
    start_order_message: str | None
    """Why older sessions that compete for the same nodes come first, if any do."""
    children: Mapping[ChildKey, Manifest]
    """Live children but the Secret, which can only be read by name."""
    predecessors: Mapping[ChildKey, Manifest]
    """Children of an earlier session of its name, which are still going."""
    has_secret: bool
    """By its witness, which is one of the children."""
    pods: tuple[Pod, ...]
    failed: Pod | None
    """The last one that was ended for good; None once another is ready in its place. KubeRay
    deletes it at once."""
    nodes: tuple[Node, ...] | None
    """All nodes; None if the operator may not see them, or is not to judge them."""
    has_kuberay: bool
    """Whether the cluster knows RayClusters."""
    has_device_claims: bool
    """Whether the cluster knows ResourceClaimTemplates (resource.k8s.io/v1)."""
    apply_error: str | None
    """Why the API server refused a child the last time, if it did."""
    completed_saves: Mapping[SaveKey, str | None]
    """What heads have done since this process started, each with the last checkpoint that was made
    for it."""
    pending_saves: frozenset[SaveKey]
    """What heads are being asked to do now."""
    now: datetime
    kuberay_gap: str | None = None
    """What the cluster's RayClusters lack that sessions need, if anything."""
    own_gap: str | None = None
    """What the cluster's definition of TrainingSession lacks, if anything."""
    cordoned: frozenset[str] = frozenset()
    """Nodes that take no more pods."""

    @property
    def has_predecessors(self) -> bool:
        """Whether children of an earlier session of its name are still going."""
        return bool(self.predecessors)

    @property
    def head(self) -> Pod | None:
        """The head's pod; one that is going only if there is no other."""
        heads = [pod for pod in self.pods if pod.component == "head"]
        return min(heads, key=lambda pod: pod.is_terminating, default=None)

    @property
    def ray_cluster(self) -> Manifest | None:
        """Its RayCluster."""
        return next(
            (child for key, child in self.children.items() if key.kind == "RayCluster"), None
        )

    @property
    def is_suspended_by_kueue(self) -> bool:
        """Whether its RayCluster may have no pods: Kueue has not admitted it, or evicted it."""
        cluster = self.ray_cluster
        return cluster is not None and bool(cluster.get("spec", {}).get("suspend"))

    @property
    def has_pods(self) -> bool:
        """Whether it has pods, or something that makes them."""
        return bool(self.pods) or self.ray_cluster is not None
