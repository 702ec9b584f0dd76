"""Conditions of both resources: their types, and the closed enum of reasons.

`Ready` sums the others up: it is True when all of `SESSION_STEPS` are, and otherwise carries the
reason of the first that is not. `Reconciling` and `Stalled` follow the kstatus convention, so that
Argo CD and Flux read the resources as they are.
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
    """What a condition is about."""

    ACCEPTED = "Accepted"
    """The specification can be served: its BaseModel exists and allows what it asks for."""
    QUOTA_RESERVED = "QuotaReserved"
    """The queue, if there is one, has let it in."""
    CLUSTER_PROVISIONED = "ClusterProvisioned"
    """All pods are scheduled and their containers started."""
    HEAD_READY = "HeadReady"
    """The head serves."""
    ENGINE_READY = "EngineReady"
    """The head has loaded its model and all workers have joined it."""
    READY = "Ready"
    """Requests are served."""
    RECONCILING = "Reconciling"
    """The operator is on its way to the wanted state."""
    STALLED = "Stalled"
    """It can't get there without somebody's help; the reason says whose."""
    SUSPENDED = "Suspended"
    """Its state is saved and its pods are gone; Unknown while they are on the way to that."""


SESSION_STEPS: Sequence[ConditionType] = (
    ConditionType.ACCEPTED,
    ConditionType.QUOTA_RESERVED,
    ConditionType.CLUSTER_PROVISIONED,
    ConditionType.HEAD_READY,
    ConditionType.ENGINE_READY,
)
"""Conditions that become True one after the other on the way to Ready."""


class Reason(StrEnum):
    """Why a condition has its status. docs/operate/operations.md says what to do about each."""

    ACCEPTED = "Accepted"
    """The specification can be served."""
    CHANGE_WAITS = "ChangeWaits"
    """The specification can be served, by other pods than those that run: suspend and resume."""
    BASE_MODEL_NOT_FOUND = "BaseModelNotFound"
    """There is no BaseModel of this modelName in the namespace. Never fits."""
    DUPLICATE = "Duplicate"
    """An older BaseModel has the same modelName, and is the one that counts."""
    NOT_ALLOWED = "NotAllowed"
    """The session asks for more than its BaseModel allows. Never fits."""
    NEVER_FITS = "NeverFits"
    """All nodes of the kind that one of its pods wants are too small for it. Never fits."""
    QUOTA_TOO_SMALL = "QuotaTooSmall"
    """The queue's or the namespace's quota could never hold it. Never fits."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """The namespace's quota is used up by others, or its owner has as many live sessions as its
    BaseModel allows. Busy: wait."""
    QUEUED = "Queued"
    """Kueue has not admitted it yet, or older sessions wait for the same nodes. Busy: wait."""
    NO_QUEUE = "NoQueue"
    """It uses no queue."""
    ADMITTED = "Admitted"
    """Kueue has admitted it."""
    UNSCHEDULABLE = "Unschedulable"
    """A pod waits for room, or for a node of the kind that it wants. Busy: wait."""
    KUBERAY_MISSING = "KubeRayMissing"
    """The cluster does not know RayClusters: install KubeRay."""
    KUBERAY_TOO_OLD = "KubeRayTooOld"
    """The cluster's definition of RayCluster lacks fields that sessions need: upgrade KubeRay."""
    KUBERAY_SILENT = "KubeRaySilent"
    """KubeRay has not reacted to the RayCluster for minutes."""
    DEFINITIONS_OUTDATED = "DefinitionsOutdated"
    """The specification can be served, but the cluster's definitions of Tinkercloud's resources are
    older than the operator: parts of the status are not kept."""
    SCHEDULING_GATED = "SchedulingGated"
    """A pod waits for somebody to remove its scheduling gates."""
    NODE_NOT_READY = "NodeNotReady"
    """The node of a pod is not ready, so the pod is not either."""
    DELETION_STUCK = "DeletionStuck"
    """Something that is being deleted should be gone by now; the message says what holds it."""
    PROVISIONING = "Provisioning"
    """Pods are being created and their images pulled."""
    PROVISIONED = "Provisioned"
    """All pods run."""
    IMAGE_PULL_BACK_OFF = "ImagePullBackOff"
    """An image can't be pulled."""
    CONFIGURATION_ERROR = "ConfigurationError"
    """A container can't be created: a Secret, a volume or a setting it names is missing."""
    OUT_OF_MEMORY = "OOMKilled"
    """A container needed more memory than its limit."""
    OUT_OF_DISK = "OutOfDisk"
    """A pod wrote more to one of its local volumes than that may hold."""
    POD_FAILED = "PodFailed"
    """Its node ended a pod, or refused it; another one is made."""
    CRASH_LOOP = "CrashLoopBackOff"
    """A container ends again and again."""
    HEAD_STARTING = "HeadStarting"
    """The head's process is starting."""
    HEAD_SERVING = "HeadServing"
    """The head serves."""
    LOADING = "Loading"
    """The head loads its model, or waits for its workers."""
    LOADED = "Loaded"
    """Model loaded, workers joined."""
    READY = "Ready"
    """Everything that was asked for is there."""
    SUSPENDING = "Suspending"
    """Its state is being saved."""
    SUSPENDED = "Suspended"
    """As `spec.suspend` asks."""
    IDLE = "Idle"
    """Nobody used it for as long as `spec.idle` says; the next request resumes it."""
    RUNNING = "Running"
    """It is not suspended."""
    LIFETIME_EXCEEDED = "LifetimeExceeded"
    """It existed for as long as `spec.maxLifetimeSeconds` says."""
    FINISHED = "Finished"
    """It is over, and is deleted after `spec.ttlSecondsAfterFinished` unless it was declared."""
    START_FAILED = "StartFailed"
    """Its pods could not run for as long as `sessions.startDeadlineSeconds` of its BaseModel says,
    and are gone."""
    TERMINATING = "Terminating"
    """It is being deleted."""
    APPLY_FAILED = "ApplyFailed"
    """The API server refuses one of its children; the message has its answer."""
    PROGRESSING = "Progressing"
    """Steps are being made."""
    STABLE = "Stable"
    """Nothing is to be done."""


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
    """A condition, as `metav1.Condition` has it."""

    type: Annotated[str, Field(max_length=64)]
    """What it is about."""
    status: ConditionStatus
    """Whether it holds."""
    reason: Annotated[str, Field(max_length=64)]
    """Why, as one word of a documented enum."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH)] = ""
    """Why, for people."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """`metadata.generation` that this was said of."""
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
"""One condition of each type."""


def timestamp(moment: datetime) -> str:
    """Return a moment as Kubernetes writes it, to the second."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def find(conditions: Sequence[Condition], kind: ConditionType) -> Condition | None:
    """Return the condition of a type."""
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
    """Return a condition; its transition time is kept unless its status changes."""
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
