"""One TrainingSession and its surroundings as last observed: plain data, without I/O.

`reconcile` decides from this alone; the current time is part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import Condition, Reason
from tinkercloud_crds.tenant import TenantSpec
from tinkercloud_crds.training_session import TrainingSessionSpec, TrainingSessionStatus
from tinkercloud_kube.objects import Manifest

SaveKey = tuple[str, str]
"""Identifies a save: its kind (`suspend`, `checkpoint` or `remove`) and the head's incarnation."""


@dataclass(frozen=True, slots=True)
class FailedSave:
    """Failures of a save that has not completed since."""

    message: str
    """What the head answered to the latest request, or why there was no answer."""
    attempts: int
    """Number of failures."""
    moment: datetime
    """When the latest request failed."""
    is_refused: bool = False
    """Whether the head answered the latest request with an error."""


@dataclass(frozen=True, slots=True)
class ChildKey:
    """Identifies a child of a session; all children are in the session's namespace."""

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
    """Whether its containers have passed their startup probes."""
    is_ready: bool
    is_terminating: bool
    restarts: int
    problem: PodProblem | None
    node: str | None = None
    """The node that it is scheduled to."""
    tolerations: frozenset[str] = frozenset()
    """Keys of the NoSchedule taints that it tolerates; an empty key stands for all taints."""
    finalizers: tuple[str, ...] = ()
    due: datetime | None = None
    """End of the grace period of a terminating pod."""
    disrupted: datetime | None = None
    """Since when a running pod is being evicted, preempted or deleted, though its RayCluster is
    not."""

    @property
    def incarnation(self) -> str:
        """Identifies one process: it differs between any two that ever ran in the pod."""
        return f"{self.uid}-{self.restarts}"

    def is_same_pod(self, incarnation: str | None) -> bool:
        """Return whether an incarnation is one of this pod, now or before a restart."""
        return incarnation is not None and incarnation.rpartition("-")[0] == self.uid


@dataclass(frozen=True, slots=True)
class ProgramPod:
    """One pod of a session's program, which is one attempt to run it."""

    created: str
    """Creation time (RFC 3339)."""
    is_running: bool
    is_ended: bool
    """Whether its container has ended for good."""
    waits: str | None
    """Why it does not run yet, if something is wrong."""
    failure: str | None
    """How it failed, if it did."""
    exit_code: int | None
    """Status of its failed exit."""


@dataclass(frozen=True, slots=True)
class Node:
    """The capacity of a node, and what it requires of pods."""

    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...]
    cpu: float
    """Cores."""
    memory: float
    """Bytes."""
    devices: Mapping[str, float]
    """GPUs, extended resources and huge pages (bytes), by resource name."""


@dataclass(frozen=True, slots=True)
class PoolCluster:
    """The pool cluster, or taken spare, that serves a session without pods of its own."""

    name: str
    endpoint: str | None
    """URL of its head; None while it is not ready, or is being deleted."""
    incarnation: str | None
    """Identity of its head process."""
    has_pods: bool
    """Whether its RayCluster exists."""
    conditions: Sequence[Condition]


@dataclass(frozen=True, slots=True)
class SessionObject:
    """The TrainingSession itself."""

    name: str
    namespace: str
    uid: str
    generation: int
    created: datetime
    deleted: datetime | None
    """When its deletion was requested."""
    has_finalizer: bool
    is_declared: bool
    """Whether a person or a GitOps tool created it, not the API server for a client."""
    spec: TrainingSessionSpec
    status: TrainingSessionStatus
    last_activity: datetime | None
    """When a client last used it, as recorded by the API server."""
    degraded: str | None = None
    """Why its run is less safe than its BaseModel promises, as the API server has recorded it."""
    leave_node: str | None = None
    """The cordoned node that it was asked to leave."""
    retried: datetime | None = None
    """When its owner or an administrator last asked to start it again."""


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """What its owner may use, and what it waits for because of others."""

    sessions_of_owner: int = 0
    """Older live sessions with the same owner and BaseModel."""
    tenant: TenantSpec | None = None
    """The Tenant of its owner, if it has one."""
    quota_message: str | None = None
    """Which limit of its owner's Tenant it waits for; None if it may start."""
    start_order_message: str | None = None
    """Why it waits for sessions that compete for the same nodes; None if it may start."""


@dataclass(frozen=True, slots=True)
class Children:
    """The objects that exist for it, except pods."""

    own: Mapping[ChildKey, Manifest]
    """Its children except the Secret, which the operator may only read by name."""
    predecessors: Mapping[ChildKey, Manifest]
    """Remaining children of a deleted session with the same name."""
    has_secret: bool
    """According to the Secret's marker, which is one of the children."""


@dataclass(frozen=True, slots=True)
class SessionPods:
    """Its pods."""

    required: tuple[Pod, ...]
    """Pods that the session needs to be Ready."""
    scaled: tuple[Pod, ...] = ()
    """Pods of engines beyond the minimum."""
    of_program: tuple[ProgramPod, ...] = ()
    """Pods of its program."""
    failed: Pod | None = None
    """The last pod that failed; None once a replacement is ready. KubeRay deletes failed pods at
    once."""

    @property
    def live(self) -> list[Pod]:
        """The required pods that are not terminating."""
        return [pod for pod in self.required if not pod.is_terminating]


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Its place on a pool cluster or a warm spare, or its pool if it is a cluster of one."""

    cluster: PoolCluster | None = None
    """The cluster that `spec.poolCluster` names, if it exists."""
    message: str | None = None
    """Why it waits for a place in a pool, or for room on its cluster; None if it does not."""
    move_failure: str | None = None
    """Why it could not be moved to another cluster; None if it is not to be moved."""
    takes_spare: bool = False
    """Whether it is about to take over a warm spare, and therefore starts no pods of its own."""
    is_emptied: bool = False
    """Whether its pool is moving its sessions to other clusters."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What the Kubernetes cluster offers to all sessions."""

    has_kuberay: bool
    """Whether the cluster serves the RayCluster API."""
    has_device_claims: bool
    """Whether the cluster serves ResourceClaimTemplates (resource.k8s.io/v1)."""
    kuberay_gap: str | None = None
    """What the served RayCluster CRD lacks, if anything."""
    own_gap: str | None = None
    """What the served TrainingSession CRD lacks, if anything."""
    nodes: tuple[Node, ...] | None = None
    """All nodes; None if the operator may not list them or should not check their capacity."""
    node_taints: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Keys of the taints that keep new pods off a node, by node; nodes without any may be missing.
    A cordon is one of them."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the API server and the session's heads have answered to this process."""

    apply_error: str | None = None
    """Why the API server rejected a child in the last attempt, if it did."""
    completed_saves: Mapping[SaveKey, str | None] = field(default_factory=dict)
    """Saves that completed since this process started, each with the last checkpoint, if it created
    one."""
    pending_saves: frozenset[SaveKey] = frozenset()
    """Saves that are in progress."""
    failed_saves: Mapping[SaveKey, FailedSave] = field(default_factory=dict)
    """Saves that have failed, and not completed since."""
    engines_needed: int | None = None
    """Number of engines that its head needs now; None if it needs those that exist, or has not
    answered."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One TrainingSession, its children, its surroundings and the current time."""

    session: SessionObject
    base_model: BaseModelSpec | None
    """The active BaseModel of its `spec.baseModel`, if there is one."""
    limits: OwnerLimits
    children: Children
    pods: SessionPods
    pool: PoolPlace
    platform: Platform
    answers: Answers
    now: datetime

    @property
    def is_in_pool(self) -> bool:
        """Whether a pool cluster or a taken spare serves it, so that it needs no pods."""
        return self.session.spec.sharing == "Shared" or self.session.spec.pool_cluster is not None

    @property
    def failed_save(self) -> FailedSave | None:
        """The failed save of its current head, if the latest one failed."""
        if self.head is None:
            return None
        failed = (
            self.answers.failed_saves.get((kind, self.head.incarnation))
            for kind in ("suspend", "checkpoint")
        )
        found = [each for each in failed if each is not None]
        return max(found, key=lambda each: each.moment, default=None)

    @property
    def head(self) -> Pod | None:
        """The head's pod; a terminating one only if there is no other."""
        heads = [pod for pod in self.pods.required if pod.component == "head"]
        return min(heads, key=lambda pod: pod.is_terminating, default=None)

    @property
    def ray_cluster(self) -> Manifest | None:
        """Its RayCluster."""
        return next(
            (child for key, child in self.children.own.items() if key.kind == "RayCluster"), None
        )

    @property
    def program_job(self) -> Manifest | None:
        """The Job of its program."""
        return next((child for key, child in self.children.own.items() if key.kind == "Job"), None)

    @property
    def is_suspended_by_kueue(self) -> bool:
        """Whether Kueue keeps its RayCluster without pods: not admitted yet, or evicted."""
        cluster = self.ray_cluster
        return cluster is not None and bool(cluster.get("spec", {}).get("suspend"))

    @property
    def has_pods(self) -> bool:
        """Whether it has pods or a RayCluster, which creates pods."""
        return bool(self.pods.required or self.pods.scaled) or self.ray_cluster is not None
