"""Conditions of both resources: their types, and the closed enum of reasons.

`Ready` summarizes the others: it is True if all of `SESSION_STEPS` are True, and otherwise carries
the reason of the first that is not. `Reconciling` and `Stalled` follow the kstatus convention, so
that Argo CD and Flux understand the resources without configuration.
"""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from tinkercloud_crds.structural import Part

ConditionStatus = Literal["True", "False", "Unknown"]

MAX_MESSAGE_LENGTH = 1024


class ConditionType(StrEnum):
    """What a condition describes."""

    ACCEPTED = "Accepted"
    """The specification is valid: its BaseModel exists and allows what it requests."""
    QUOTA_RESERVED = "QuotaReserved"
    """Kueue has admitted the session, or it uses no queue, or it has a place in the pool."""
    CLUSTER_PROVISIONED = "ClusterProvisioned"
    """All pods are scheduled and their containers have started."""
    HEAD_READY = "HeadReady"
    """The head accepts connections."""
    ENGINE_READY = "EngineReady"
    """The head has loaded its model and all workers have joined."""
    READY = "Ready"
    """The resource is ready: a session serves requests, a BaseModel can be requested."""
    RECONCILING = "Reconciling"
    """The operator is working towards the desired state."""
    STALLED = "Stalled"
    """The desired state cannot be reached without intervention; the reason says what is needed."""
    SUSPENDED = "Suspended"
    """The session's state is saved and its pods are deleted; Unknown while it is being
    suspended."""
    DURABILITY_DEGRADED = "DurabilityDegraded"
    """A session that serves requests would lose steps if its head were killed, although its
    BaseModel promises more: journal or snapshots can't be written. Absent otherwise."""


SESSION_STEPS: Sequence[ConditionType] = (
    ConditionType.ACCEPTED,
    ConditionType.QUOTA_RESERVED,
    ConditionType.CLUSTER_PROVISIONED,
    ConditionType.HEAD_READY,
    ConditionType.ENGINE_READY,
)
"""Conditions that become True one after the other on the way to Ready."""


class Reason(StrEnum):
    """Why a condition has its status. docs/operate/operations.md says how to resolve each."""

    ACCEPTED = "Accepted"
    """The specification is valid."""
    CHANGE_WAITS = "ChangeWaits"
    """The specification is valid, but the running pods were started with an earlier one. Suspend
    and resume the session to apply the change."""
    BASE_MODEL_NOT_FOUND = "BaseModelNotFound"
    """The namespace has no BaseModel with this modelName. Stalled."""
    DUPLICATE = "Duplicate"
    """An older BaseModel has the same modelName and takes precedence."""
    NOT_ALLOWED = "NotAllowed"
    """The session requests more than its BaseModel allows. Stalled."""
    NEVER_FITS = "NeverFits"
    """Every node that matches one of the session's pods is too small for it. Stalled."""
    QUOTA_TOO_SMALL = "QuotaTooSmall"
    """A ResourceQuota of the namespace is smaller than the session needs. Stalled."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """A limit of the owner's Tenant is in use, or the owner has reached the BaseModel's maximum
    number of live sessions. The session waits."""
    NAMESPACE_QUOTA_EXCEEDED = "NamespaceQuotaExceeded"
    """Others use up a ResourceQuota of the namespace. The session waits."""
    QUEUED = "Queued"
    """Kueue has not admitted the session yet, or older sessions are waiting for the same nodes. The
    session waits."""
    POOL_FULL = "PoolFull"
    """No cluster of the pool is ready and has a free slot. The session waits."""
    POOL_CLUSTER_NOT_READY = "PoolClusterNotReady"
    """The cluster of the pool that serves the session is not ready. The session waits."""
    PLACED = "Placed"
    """A cluster of the pool serves the session."""
    MOVE_FAILED = "MoveFailed"
    """A cluster of the pool serves the session, whose head could not give it to another cluster.
    The move is tried again."""
    NO_QUEUE = "NoQueue"
    """The session uses no queue."""
    ADMITTED = "Admitted"
    """Kueue has admitted the session."""
    UNSCHEDULABLE = "Unschedulable"
    """A pod is waiting for capacity, or for a node that matches it. The session waits."""
    KUBERAY_MISSING = "KubeRayMissing"
    """The cluster has no RayCluster CRD: install KubeRay."""
    KUBERAY_TOO_OLD = "KubeRayTooOld"
    """The cluster's RayCluster CRD lacks fields that sessions need: upgrade KubeRay."""
    KUBERAY_SILENT = "KubeRaySilent"
    """KubeRay has not reacted to the RayCluster for minutes."""
    DEFINITIONS_OUTDATED = "DefinitionsOutdated"
    """The specification is valid, but the cluster's Tinkercloud CRDs are older than the operator:
    parts of the status are dropped."""
    SCHEDULING_GATED = "SchedulingGated"
    """A pod is waiting for its scheduling gates to be removed."""
    NODE_NOT_READY = "NodeNotReady"
    """The node of a pod is not ready, so the pod is not ready either."""
    DELETION_STUCK = "DeletionStuck"
    """A deletion takes longer than it should; the message says what blocks it."""
    PROVISIONING = "Provisioning"
    """Pods are being created and their images pulled."""
    PROVISIONED = "Provisioned"
    """All pods are running."""
    IMAGE_PULL_BACK_OFF = "ImagePullBackOff"
    """An image cannot be pulled."""
    CONFIGURATION_ERROR = "ConfigurationError"
    """A container cannot be created: a Secret, a volume or a setting it refers to is missing."""
    OUT_OF_MEMORY = "OOMKilled"
    """A container exceeded its memory limit."""
    OUT_OF_DISK = "OutOfDisk"
    """A pod exceeded the size of one of its local volumes."""
    POD_FAILED = "PodFailed"
    """A pod was evicted, preempted or rejected by its node; a replacement is created."""
    CRASH_LOOP = "CrashLoopBackOff"
    """A container exits repeatedly."""
    HEAD_TERMINATING = "HeadTerminating"
    """The RayCluster was deleted, and its head may still be saving its state. New pods are created
    when it has ended."""
    HEAD_STARTING = "HeadStarting"
    """The head's process is starting."""
    HEAD_SERVING = "HeadServing"
    """The head accepts connections."""
    LOADING = "Loading"
    """The head is loading its model, or waiting for its workers."""
    LOADED = "Loaded"
    """The model is loaded and all workers have joined."""
    READY = "Ready"
    """The resource is ready."""
    SUSPENDING = "Suspending"
    """The session's state is being saved."""
    DISRUPTED = "Disrupted"
    """One of the session's pods is being evicted or preempted, or its node will end soon. The
    session's state is being saved, to resume it on other nodes."""
    SAVE_FAILED = "SaveFailed"
    """The session's state could not be saved, so its pods are kept, and the save is repeated."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true."""
    WRITES_FAIL = "WritesFail"
    """The head can't write the journal or the snapshots of the run; the message says why."""
    IDLE = "Idle"
    """The session was not used for `spec.idle.timeoutSeconds`; the next request resumes it."""
    RUNNING = "Running"
    """The session is not suspended."""
    LIFETIME_EXCEEDED = "LifetimeExceeded"
    """The session reached its maximum lifetime."""
    FINISHED = "Finished"
    """The session has ended. It is deleted after `spec.ttlSecondsAfterFinished` unless it was
    declared."""
    START_FAILED = "StartFailed"
    """The session's pods failed to run for `sessions.startDeadlineSeconds` of its BaseModel and
    were deleted."""
    RESTART_LIMIT = "RestartLimit"
    """The session's head exited `sessions.maxRestarts` times within `sessions.restartWindowSeconds`
    of its BaseModel, so its pods were deleted."""
    TERMINATING = "Terminating"
    """The session is being deleted."""
    APPLY_FAILED = "ApplyFailed"
    """The API server rejected one of the session's children; the message contains its response."""
    PROGRESSING = "Progressing"
    """The operator is working towards the desired state."""
    STABLE = "Stable"
    """The desired state is reached."""


NEVER_FITS = frozenset(
    {
        Reason.BASE_MODEL_NOT_FOUND,
        Reason.NOT_ALLOWED,
        Reason.NEVER_FITS,
        Reason.QUOTA_TOO_SMALL,
        Reason.KUBERAY_MISSING,
        Reason.KUBERAY_TOO_OLD,
    }
)
"""Reasons that no waiting cures."""


class Condition(Part):
    """A condition, with the fields of `metav1.Condition`."""

    type: Annotated[str, Field(max_length=64)]
    """Type of the condition."""
    status: ConditionStatus
    """Status of the condition."""
    reason: Annotated[str, Field(max_length=64)]
    """Machine-readable reason for the status. The documentation lists all reasons."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH)] = ""
    """Human-readable explanation of the status."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The `metadata.generation` that this condition is based on."""
    last_transition_time: Annotated[str, Field(max_length=40)]
    """When the status last changed (RFC 3339)."""


Conditions = Annotated[
    list[Condition],
    Field(
        default_factory=list,
        max_length=16,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    ),
]
"""Conditions with unique types."""


def timestamp(moment: datetime) -> str:
    """Return a datetime in Kubernetes' notation, to the second."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def find(conditions: Sequence[Condition], kind: ConditionType) -> Condition | None:
    """Return the condition of a type, or None."""
    return next((condition for condition in conditions if condition.type == kind), None)


def moved(
    previous: Sequence[Condition],
    kind: ConditionType,
    status: ConditionStatus,
    reason: Reason,
    message: str,
    *,
    generation: int,
    now: datetime,
) -> Condition:
    """Return a condition, whose transition time changes only if its status does."""
    before = find(previous, kind)
    is_same = before is not None and before.status == status
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message[:MAX_MESSAGE_LENGTH],
        observed_generation=generation,
        last_transition_time=before.last_transition_time
        if before is not None and is_same
        else timestamp(now),
    )
