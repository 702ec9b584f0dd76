"""TrainingSession: one training run, or one sampler, and the pods that serve it."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tinkercloud_crds.base_model import ModelName
from tinkercloud_crds.conditions import Conditions
from tinkercloud_crds.placement import ObjectName
from tinkercloud_crds.shapes import Idle, Message, Seconds, Text
from tinkercloud_crds.structural import IMMUTABLE, Part, rules

MAX_NAME_LENGTH = 40
"""KubeRay refuses cluster names over 53 characters, and children's names are derived from ours."""

Phase = Literal[
    "Pending",
    "Queued",
    "Provisioning",
    "Loading",
    "Ready",
    "Suspending",
    "Suspended",
    "Finished",
    "Failed",
    "Terminating",
]

TinkerPath = Annotated[
    str,
    Field(
        max_length=512,
        pattern=r"^tinker://[^/]+/weights/[^/]+$",
    ),
]


class Lora(Part):
    """The adapter to train."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.trainAttention || self.trainMlp || self.trainUnembed",
                "at least one of trainAttention, trainMlp and trainUnembed must be true",
            ),
        )
    )

    rank: Annotated[int, Field(ge=1, le=1024)] = 32
    """Rank of the adapter."""
    seed: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Seed of the initial weights; absent means a random one."""
    train_attention: bool = True
    """Whether attention layers are trained."""
    train_mlp: bool = True
    """Whether MLP layers are trained."""
    train_unembed: bool = True
    """Whether the unembedding is trained."""


class RestoreFrom(Part):
    """The checkpoint a session starts from."""

    path: TinkerPath
    """A training checkpoint."""
    optimizer: bool = False
    """Whether the optimizer's state is restored too."""


class TrainerOverride(Part):
    """What a session may change of the trainer's shape: only downwards."""

    replicas: Annotated[int, Field(ge=1, le=512)] | None = None
    """Fewer worker pods."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=1 << 22)] | None = None
    """Smaller micro-batches."""


class SamplerOverride(Part):
    """What a session may change of the sampler's shape: only downwards."""

    replicas: Annotated[int, Field(ge=1, le=512)] | None = None
    """Fewer engines."""


class TrainingSessionSpec(Part):
    """What is wanted. It names no image, volume, node or service account: its BaseModel does."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.modelId) == has(oldSelf.modelId)",
                "modelId: can't be added or removed later",
            ),
            ("has(self.lora) == has(oldSelf.lora)", "lora: can't be added or removed later"),
            (
                "has(self.restoreFrom) == has(oldSelf.restoreFrom)",
                "restoreFrom: can't be added or removed later",
            ),
            (
                "has(self.queueName) == has(oldSelf.queueName)",
                "queueName: can't be added or removed later",
            ),
            (
                "self.role != 'Sampler' || (!has(self.lora) && !has(self.restoreFrom)"
                " && !has(self.trainer))",
                "role: a Sampler trains nothing; leave lora, restoreFrom and trainer out",
            ),
        )
    )

    base_model: Annotated[ModelName, Field(json_schema_extra=rules(IMMUTABLE))]
    """`modelName` of a BaseModel in the same namespace."""
    role: Annotated[Literal["Trainer", "Sampler"], Field(json_schema_extra=rules(IMMUTABLE))] = (
        "Trainer"
    )
    """Trainer: one training run and its samplers. Sampler: samplers of the base model or of saved
    checkpoints, without a trainer."""
    model_id: (
        Annotated[
            str,
            Field(
                max_length=200,
                pattern=r"^[0-9A-Za-z][0-9A-Za-z-]{0,63}:train:(0|[1-9][0-9]*)$",
                json_schema_extra=rules(IMMUTABLE),
            ),
        ]
        | None
    ) = None
    """The SDK's id of the run, set by the API server; absent when declared in Git."""
    owner: Annotated[str, Field(min_length=1, max_length=128, json_schema_extra=rules(IMMUTABLE))]
    """Whose it is: the owner of the API keys that may use it."""
    lora: Annotated[Lora, Field(json_schema_extra=rules(IMMUTABLE))] | None = None
    """The adapter to train; absent means the whole model."""
    optimizer: Annotated[Literal["adamw"], Field(json_schema_extra=rules(IMMUTABLE))] = "adamw"
    """The optimizer family."""
    restore_from: Annotated[RestoreFrom, Field(json_schema_extra=rules(IMMUTABLE))] | None = None
    """The checkpoint to start from."""
    trainer: TrainerOverride | None = None
    """A smaller trainer than the BaseModel's."""
    sampler: SamplerOverride | None = None
    """A smaller sampler than the BaseModel's."""
    queue_name: Annotated[ObjectName, Field(json_schema_extra=rules(IMMUTABLE))] | None = None
    """One of the LocalQueues that the BaseModel allows."""
    priority_class_name: ObjectName | None = None
    """One of the PriorityClasses that the BaseModel allows."""
    suspend: bool = False
    """Whether its state is to be saved and its pods to go."""
    idle: Idle | None = None
    """What happens when nobody uses it; the BaseModel's unless given."""
    max_lifetime_seconds: Seconds | None = None
    """After this long it ends: last checkpoint, then as ttlSecondsAfterFinished says."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] = 3600
    """How long it is kept to look at once it has ended. One that was declared, not made by the
    API server, is never deleted: it stays Finished."""


class Workers(Part):
    """Worker pods that are ready, and wanted."""

    trainers_ready: Annotated[int, Field(ge=0)] = 0
    """Trainers that are ready."""
    trainers_desired: Annotated[int, Field(ge=0)] = 0
    """Trainers that are wanted; a head that trains itself counts as one."""
    samplers_ready: Annotated[int, Field(ge=0)] = 0
    """Samplers that are ready."""
    samplers_desired: Annotated[int, Field(ge=0)] = 0
    """Samplers that are wanted; a head that samples itself counts as one."""
    trainers: Annotated[str, Field(max_length=16)] = ""
    """Ready/wanted, for `kubectl get`."""
    samplers: Annotated[str, Field(max_length=16)] = ""
    """Ready/wanted, for `kubectl get`."""


class Failing(Part):
    """Why a session's pods can't run."""

    since: Annotated[str, Field(max_length=40)]
    """Since when, without having been Ready meanwhile (RFC 3339)."""
    message: Message = ""
    """What was seen last."""


class TrainingSessionStatus(Part):
    """What the operator has seen."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """`metadata.generation` this status is about."""
    phase: Phase = "Pending"
    """A summary for people; programs read the conditions."""
    conditions: Conditions
    """Accepted, QuotaReserved, ClusterProvisioned, HeadReady, EngineReady, Ready, Reconciling,
    Stalled, Suspended."""
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """URL of the head inside the cluster, while it is ready."""
    incarnation: Annotated[str, Field(max_length=128)] | None = None
    """Differs between any two processes that ever served at `endpoint`: the head pod's uid and
    the container's number of restarts."""
    ray_cluster: Text | None = None
    """Name of its RayCluster, while it has one."""
    workers: Workers = Workers()
    """Pods that are ready, and wanted."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs its pods ask for."""
    plan: Message | None = None
    """How the operator splits the model over the trainers' GPUs, and why, where the BaseModel
    leaves that to it."""
    last_activity_time: Annotated[str, Field(max_length=40)] | None = None
    """When a client last used it (RFC 3339)."""
    latest_checkpoint: Annotated[str, Field(max_length=512)] | None = None
    """The last checkpoint that the operator knows of."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Head processes that ended without having been asked to."""
    saved_incarnation: Annotated[str, Field(max_length=128)] | None = None
    """The incarnation whose state was saved before its pods went."""
    failing: Failing | None = None
    """Why its pods can't run, while they can't."""
    finished_time: Annotated[str, Field(max_length=40)] | None = None
    """When it ended (RFC 3339)."""
    message: Message | None = None
    """The Ready condition's message."""
