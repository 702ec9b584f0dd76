"""TrainingSession: one training run, or one sampler, and the pods that serve it."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tinkercloud_crds.base_model import ModelName
from tinkercloud_crds.conditions import Conditions
from tinkercloud_crds.placement import ObjectName
from tinkercloud_crds.shapes import Idle, Message, Seconds, Text
from tinkercloud_crds.structural import IMMUTABLE, Part, rules

MAX_NAME_LENGTH = 40
"""KubeRay rejects cluster names longer than 53 characters, and children's names add suffixes."""

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
    """The LoRA adapter to train."""

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
    """Seed of the initial weights. If absent, a random seed is used."""
    train_attention: bool = True
    """Whether attention layers are trained."""
    train_mlp: bool = True
    """Whether MLP layers are trained."""
    train_unembed: bool = True
    """Whether the unembedding layer (lm_head) is trained."""


class RestoreFrom(Part):
    """The checkpoint that a session starts from."""

    path: TinkerPath
    """`tinker://` path of a training checkpoint."""
    optimizer: bool = False
    """Whether the optimizer state is restored too."""


class TrainerOverride(Part):
    """Overrides of the BaseModel's trainer. A session can only lower them."""

    replicas: Annotated[int, Field(ge=1, le=512)] | None = None
    """Number of trainer pods, at most the BaseModel's."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=1 << 22)] | None = None
    """Maximum number of tokens per micro-batch, at most the BaseModel's."""


class SamplerOverride(Part):
    """Overrides of the BaseModel's sampler. A session can only lower them."""

    replicas: Annotated[int, Field(ge=1, le=512)] | None = None
    """Number of engines, at most the BaseModel's."""


class TrainingSessionSpec(Part):
    """A training run, or a sampler, of a BaseModel, which defines images, volumes and nodes."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.modelId) == has(oldSelf.modelId)",
                "modelId: cannot be added or removed after creation",
            ),
            (
                "has(self.lora) == has(oldSelf.lora)",
                "lora: cannot be added or removed after creation",
            ),
            (
                "has(self.restoreFrom) == has(oldSelf.restoreFrom)",
                "restoreFrom: cannot be added or removed after creation",
            ),
            (
                "has(self.queueName) == has(oldSelf.queueName)",
                "queueName: cannot be added or removed after creation",
            ),
            (
                "self.role != 'Sampler' || (!has(self.lora) && !has(self.restoreFrom)"
                " && !has(self.trainer))",
                "role: a Sampler does not train; remove lora, restoreFrom and trainer",
            ),
        )
    )

    base_model: Annotated[ModelName, Field(json_schema_extra=rules(IMMUTABLE))]
    """`modelName` of a BaseModel in the same namespace."""
    role: Annotated[Literal["Trainer", "Sampler"], Field(json_schema_extra=rules(IMMUTABLE))] = (
        "Trainer"
    )
    """`Trainer`: one training run and its samplers. `Sampler`: samplers of the base model or of
    saved checkpoints, without a trainer."""
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
    """The SDK's id of the run, set by the API server. Absent in sessions that are declared in
    Git."""
    owner: Annotated[str, Field(min_length=1, max_length=128, json_schema_extra=rules(IMMUTABLE))]
    """Owner of the session. API keys of this owner may use it."""
    lora: Annotated[Lora, Field(json_schema_extra=rules(IMMUTABLE))] | None = None
    """The adapter to train. If absent, the session trains the whole model."""
    optimizer: Annotated[Literal["adamw"], Field(json_schema_extra=rules(IMMUTABLE))] = "adamw"
    """Type of optimizer."""
    restore_from: Annotated[RestoreFrom, Field(json_schema_extra=rules(IMMUTABLE))] | None = None
    """The checkpoint to start from."""
    trainer: TrainerOverride | None = None
    """Requests a smaller trainer than the BaseModel's."""
    sampler: SamplerOverride | None = None
    """Requests a smaller sampler than the BaseModel's."""
    queue_name: Annotated[ObjectName, Field(json_schema_extra=rules(IMMUTABLE))] | None = None
    """One of the LocalQueues that the BaseModel allows."""
    priority_class_name: ObjectName | None = None
    """One of the PriorityClasses that the BaseModel allows."""
    suspend: bool = False
    """Whether the session is suspended: its state is saved and its pods are deleted."""
    idle: Idle | None = None
    """What happens when nobody uses the session. Defaults to the BaseModel's `sessions.idle`."""
    max_lifetime_seconds: Seconds | None = None
    """Maximum lifetime in seconds. When it expires, a last checkpoint is saved, the session ends,
    and ttlSecondsAfterFinished applies."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] = 3600
    """How long, in seconds, the session is kept for inspection after it has ended. A session that
    was declared, not created by the API server, is never deleted: it stays Finished."""


class Workers(Part):
    """Numbers of ready and desired workers."""

    trainers_ready: Annotated[int, Field(ge=0)] = 0
    """Number of ready trainers."""
    trainers_desired: Annotated[int, Field(ge=0)] = 0
    """Number of desired trainers. A head that trains counts as one."""
    samplers_ready: Annotated[int, Field(ge=0)] = 0
    """Number of ready samplers."""
    samplers_desired: Annotated[int, Field(ge=0)] = 0
    """Number of desired samplers. A head that samples counts as one."""
    trainers: Annotated[str, Field(max_length=16)] = ""
    """Ready/desired trainers, as `kubectl get` shows them."""
    samplers: Annotated[str, Field(max_length=16)] = ""
    """Ready/desired samplers, as `kubectl get` shows them."""


class Failing(Part):
    """Why the pods of a session fail to run."""

    since: Annotated[str, Field(max_length=40)]
    """When the pods began to fail, without having been Ready since (RFC 3339)."""
    message: Message = ""
    """The most recent failure."""


class TrainingSessionStatus(Part):
    """The status that the operator last observed."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The `metadata.generation` that this status describes."""
    phase: Phase = "Pending"
    """A summary for people. Programs should read the conditions."""
    conditions: Conditions
    """Conditions of types Accepted, QuotaReserved, ClusterProvisioned, HeadReady, EngineReady,
    Ready, Reconciling, Stalled and Suspended."""
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """URL of the head inside the cluster, while the head is ready."""
    incarnation: Annotated[str, Field(max_length=128)] | None = None
    """Identifies the head process at `endpoint`: the head pod's uid and the container's restart
    count."""
    ray_cluster: Text | None = None
    """Name of the session's RayCluster, while there is one."""
    workers: Workers = Workers()
    """Numbers of ready and desired workers."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs that the session's pods request."""
    plan: Message | None = None
    """How the operator divides the model over the trainers' GPUs, and why, if the BaseModel sets
    `trainer.planning`."""
    last_activity_time: Annotated[str, Field(max_length=40)] | None = None
    """When a client last used the session (RFC 3339)."""
    latest_checkpoint: Annotated[str, Field(max_length=512)] | None = None
    """`tinker://` path of the newest checkpoint that the operator knows."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Number of head processes that ended unexpectedly."""
    saved_incarnation: Annotated[str, Field(max_length=128)] | None = None
    """The incarnation whose state was saved before its pods were deleted."""
    failing: Failing | None = None
    """Why the session's pods fail to run, while they do."""
    finished_time: Annotated[str, Field(max_length=40)] | None = None
    """When the session ended (RFC 3339)."""
    message: Message | None = None
    """Message of the Ready condition."""
