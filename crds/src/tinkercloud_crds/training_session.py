"""TrainingSession: one training run, or one sampler, and the pods that serve it."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tinkercloud_crds.base_model import ModelName, Sharing
from tinkercloud_crds.conditions import Conditions
from tinkercloud_crds.pods.placement import ObjectName
from tinkercloud_crds.pods.program_fields import ProgramField, ProgramStatus
from tinkercloud_crds.pods.shapes import Idle, Message, Seconds, Text
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


SERVING_ROLES = frozenset({"Pool", "Spare"})
"""Roles of sessions that belong to no user: their pods serve other sessions."""


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
    """Seed of the initial weights. If unset, the seed is random."""
    train_attention: bool = True
    """Whether to train the attention layers."""
    train_mlp: bool = True
    """Whether to train the MLP layers."""
    train_unembed: bool = True
    """Whether to train the unembedding layer (lm_head)."""


class RestoreFrom(Part):
    """The checkpoint that a session starts from."""

    path: TinkerPath
    """`tinker://` path of a training checkpoint."""
    optimizer: bool = False
    """Whether to restore the optimizer state in addition to the weights."""


class TrainerOverride(Part):
    """Overrides of the BaseModel's trainer. A session can only lower its values."""

    replicas: Annotated[int, Field(ge=1, le=512)] | None = None
    """Number of trainer pods. The maximum is the BaseModel's `trainer.replicas`."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=1 << 22)] | None = None
    """Maximum number of tokens per micro-batch. The BaseModel defines the upper bound."""


class SamplerOverride(Part):
    """Overrides of the BaseModel's sampler. A session can only lower its values."""

    replicas: Annotated[int, Field(ge=1, le=512)] | None = None
    """Number of engines. The maximum is the BaseModel's `sampler.replicas`. If the number follows
    the load, this is its maximum instead of the BaseModel's `sampler.engines.maxReplicas`."""


class TrainingSessionSpec(Part):
    """A training run or sampler that uses the images, volumes and nodes of a BaseModel."""

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
                "role: lora, restoreFrom and trainer are not valid for role Sampler; remove them",
            ),
            (
                "!(self.role in ['Pool', 'Spare']) || (self.sharing == 'Dedicated'"
                " && !has(self.modelId) && !has(self.lora) && !has(self.restoreFrom)"
                " && !has(self.trainer) && !has(self.sampler) && !has(self.program))",
                "role: sharing, modelId, lora, restoreFrom, trainer, sampler and program are not"
                " valid for roles Pool and Spare; remove them",
            ),
            (
                "self.sharing != 'Shared' || self.role == 'Sampler'"
                " || (has(self.lora) && has(self.modelId))",
                "sharing: Shared requires lora and modelId, because full fine-tuning and sessions"
                " from your own manifests need their own pods; remove sharing",
            ),
            (
                "self.sharing != 'Shared' || (!has(self.trainer) && !has(self.sampler)"
                " && !has(self.queueName) && !has(self.priorityClassName) && !has(self.program))",
                "sharing: trainer, sampler, queueName, priorityClassName and program are not valid"
                " with Shared, because the session has no pods of its own; remove them",
            ),
            (
                "!has(self.poolCluster) || self.sharing == 'Shared' || self.role == 'Trainer'",
                "poolCluster: only valid with sharing Shared or role Trainer; remove it",
            ),
        )
    )

    base_model: Annotated[ModelName, Field(json_schema_extra=rules(IMMUTABLE))]
    """`modelName` of a BaseModel in the same namespace."""
    role: Annotated[
        Literal["Trainer", "Sampler", "Pool", "Spare"], Field(json_schema_extra=rules(IMMUTABLE))
    ] = "Trainer"
    """`Trainer`: one training run and its samplers. `Sampler`: only samplers, of the base model or
    of saved checkpoints. `Pool`: the pods of one cluster of the BaseModel's pool. `Spare`: the pods
    of a warm spare. The operator creates both."""
    sharing: Annotated[Sharing, Field(json_schema_extra=rules(IMMUTABLE))] = "Dedicated"
    """`Dedicated`: the session has its own pods. `Shared`: a cluster of the BaseModel's pool serves
    it, together with sessions of other owners."""
    pool_cluster: ObjectName | None = None
    """TrainingSession of role Pool or Spare whose pods serve this session, set by the operator.
    Leave it unset in your own manifests, and do not change it: the state of a run does not move
    with it."""
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
    """ID of the training run in the SDK, set by the API server. Leave it unset in your own
    manifests."""
    owner: Annotated[str, Field(min_length=1, max_length=128, json_schema_extra=rules(IMMUTABLE))]
    """Owner of the session. API keys of this owner may use it."""
    lora: Annotated[Lora, Field(json_schema_extra=rules(IMMUTABLE))] | None = None
    """The LoRA adapter to train. If unset, the session trains the whole model."""
    optimizer: Annotated[Literal["adamw"], Field(json_schema_extra=rules(IMMUTABLE))] = "adamw"
    """Type of optimizer."""
    restore_from: Annotated[RestoreFrom, Field(json_schema_extra=rules(IMMUTABLE))] | None = None
    """The checkpoint to start from."""
    trainer: TrainerOverride | None = None
    """Overrides of the BaseModel's trainer. A session can only lower its values."""
    sampler: SamplerOverride | None = None
    """Overrides of the BaseModel's sampler. A session can only lower its values."""
    queue_name: Annotated[ObjectName, Field(json_schema_extra=rules(IMMUTABLE))] | None = None
    """Kueue LocalQueue for the session. The BaseModel must allow it."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods. The BaseModel must allow it."""
    program: ProgramField | None = None
    """A program that runs next to the session. The BaseModel must allow programs."""
    suspend: bool = False
    """Whether to suspend the session. The operator then saves its state and deletes its pods."""
    idle: Idle | None = None
    """What to do when the session receives no requests. Defaults to the BaseModel's
    `sessions.idle`."""
    max_lifetime_seconds: Seconds | None = None
    """Maximum lifetime in seconds. After this time the operator saves a final checkpoint and ends
    the session, and `ttlSecondsAfterFinished` applies."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] = 3600
    """How long, in seconds, to keep the session for inspection after it ends. A session from your
    own manifest, not from the API server, is never deleted and stays Finished."""


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
    """Ready and desired trainers, such as `1/2`, for `kubectl get`."""
    samplers: Annotated[str, Field(max_length=16)] = ""
    """Ready and desired samplers, such as `1/2`, for `kubectl get`."""


class Failing(Part):
    """Failure that keeps a session's pods from running."""

    since: Annotated[str, Field(max_length=40)]
    """When the pods began to fail (RFC 3339). The session has not been Ready since."""
    message: Message = ""
    """The most recent failure."""
    reason: Literal["StartFailed", "RestartLimit"] = "StartFailed"
    """Whether the pods fail to run, which is tolerated until `sessions.startDeadlineSeconds` of the
    BaseModel, or the head has exited `sessions.maxRestarts` times."""


class TrainingSessionStatus(Part):
    """Most recently observed status. Set by the operator."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The `metadata.generation` that this status is based on."""
    phase: Phase = "Pending"
    """Summary of the conditions for human readers. Programs should read the conditions instead."""
    conditions: Conditions
    """The conditions Accepted, QuotaReserved, ClusterProvisioned, HeadReady, EngineReady, Ready,
    Reconciling, Stalled, Suspended and DurabilityDegraded."""
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """Cluster-internal URL of the head. Only set while the head is ready."""
    incarnation: Annotated[str, Field(max_length=128)] | None = None
    """Identity of the head process at `endpoint`: the UID of the head pod and the restart count of
    its container."""
    ray_cluster: Text | None = None
    """Name of the session's RayCluster, if it exists."""
    workers: Workers = Workers()
    """Numbers of ready and desired workers."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs that the session's pods request."""
    max_gpus: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of GPUs that the session's pods may request. Only set if the number of engines
    follows the load."""
    plan: Message | None = None
    """The parallelism that the operator chose for the trainers, with an explanation. Only set if
    the BaseModel sets `trainer.planning`."""
    last_activity_time: Annotated[str, Field(max_length=40)] | None = None
    """When a client last used the session (RFC 3339)."""
    idle_since: Annotated[str, Field(max_length=40)] | None = None
    """Since when the session's GPUs count as idle (RFC 3339): five minutes after its last request
    or long poll. Only set while its pods are ready, and no program of it runs."""
    latest_checkpoint: Annotated[str, Field(max_length=512)] | None = None
    """`tinker://` path of the newest checkpoint that the operator requested."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Number of unexpected exits of the head process."""
    recent_restarts: Annotated[
        list[Annotated[str, Field(max_length=40)]], Field(default_factory=list, max_length=50)
    ]
    """When the head process exited unexpectedly (RFC 3339), as far as it counts towards the
    BaseModel's `sessions.maxRestarts`."""
    served_incarnation: Annotated[str, Field(max_length=128)] | None = None
    """The last incarnation that was ready, and may therefore have state to save."""
    saved_incarnation: Annotated[str, Field(max_length=128)] | None = None
    """The last incarnation that saved its state before its pods were deleted."""
    failing: Failing | None = None
    """Failure that keeps the session's pods from running. Only set while they fail."""
    finished_time: Annotated[str, Field(max_length=40)] | None = None
    """When the session ended (RFC 3339)."""
    program: ProgramStatus | None = None
    """State of `spec.program`."""
    message: Message | None = None
    """Message of the Ready condition."""
