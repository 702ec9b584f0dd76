"""BaseModel: a model that the platform offers. `get_server_capabilities` lists the ready ones."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tinkercloud_crds.conditions import Conditions
from tinkercloud_crds.idle_gpus import IdleGpus
from tinkercloud_crds.pods.placement import ObjectName, Placement
from tinkercloud_crds.pods.program_fields import Programs
from tinkercloud_crds.pods.shapes import (
    MAX_TOKENS,
    HeadShape,
    Idle,
    Message,
    SamplerShape,
    Seconds,
    Text,
    TrainerShape,
)
from tinkercloud_crds.structural import Part, rules

ModelName = Annotated[
    str,
    Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?$"),
]


Sharing = Literal["Dedicated", "Shared"]


class VolumeSource(Part):
    """A folder in Hugging Face layout on a volume, mounted read-only."""

    claim_name: ObjectName
    """Name of the PersistentVolumeClaim."""
    path: Annotated[str, Field(max_length=512, pattern=r"^[^/].*$")]
    """Path of the folder, relative to the root of the volume."""


class ModelSource(Part):
    """Where the weights come from. Set exactly one of hub, volume or uri."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.hub), has(self.volume), has(self.uri)].filter(x, x).size() == 1",
                "set exactly one of hub, volume or uri",
            ),
            (
                "!has(self.volume) || !self.volume.path.split('/').exists(part, part == '..')",
                "volume.path: must not contain '..'",
            ),
            (
                "!has(self.revision) || has(self.hub)",
                "revision: only valid with hub; remove it, or set hub",
            ),
        )
    )

    hub: ModelName | None = None
    """Model ID on the Hugging Face Hub. Each pod downloads the model when it starts."""
    revision: (
        Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None
    ) = None
    """Commit, tag or branch of `hub`. If unset, each pod downloads the current `main` when it
    starts. Set a commit to use the same weights in all pods, even after a session is suspended and
    resumed."""
    volume: VolumeSource | None = None
    """A folder on a volume."""
    uri: Annotated[str, Field(max_length=1024, pattern=r"^(s3|gs|az)://.+$")] | None = None
    """URL of a folder in an object store. Each pod downloads the model when it starts."""
    secret_name: ObjectName | None = None
    """Secret whose entries become environment variables of the container that downloads the model,
    such as HF_TOKEN or the credentials of the object store."""


class Limits(Part):
    """Limits for each session."""

    max_lora_rank: Annotated[int, Field(ge=1, le=1024)] = 256
    """Maximum rank of an adapter."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Maximum `trainer.maxBatchTokens` of a session. Defaults to the BaseModel's
    `trainer.maxBatchTokens`."""
    max_sessions_per_owner: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Maximum number of live sessions per owner. Further sessions wait (`QuotaExceeded`). If unset,
    the number is unlimited."""


CORDON = "node.kubernetes.io/unschedulable"
"""Taint of a cordoned node."""
DRAINING_TAINTS = (CORDON, "karpenter.sh/disrupted", "ToBeDeletedByClusterAutoscaler")
"""Taints of nodes that are emptied by evictions, which wait for disruption budgets."""
ENDING_TAINTS = (
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination",
)
"""Taints of nodes that will be terminated soon, even if pods still run on them."""
TaintKey = Annotated[
    str, Field(min_length=1, max_length=316, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$")
]


class SessionPolicy(Part):
    """What a session, and therefore an SDK user through tags, may choose."""

    queue_names: Annotated[list[ObjectName], Field(default_factory=list, max_length=64)]
    """LocalQueues that a session may choose in addition to the BaseModel's own."""
    priority_class_names: Annotated[list[ObjectName], Field(default_factory=list, max_length=64)]
    """PriorityClasses that a session may choose in addition to the BaseModel's own."""
    idle: Idle = Idle()
    """Idle policy of sessions that do not set `spec.idle`."""
    max_idle_timeout_seconds: Seconds | None = None
    """Maximum idle timeout, in seconds, that a session may choose. If unset, the timeout is
    unlimited."""
    max_lifetime_seconds: Seconds | None = None
    """Maximum lifetime of a session, in seconds. It also applies to sessions without
    `maxLifetimeSeconds`. If unset, the lifetime is unlimited."""
    leave_taints: Annotated[
        list[TaintKey],
        Field(default_factory=lambda: [*DRAINING_TAINTS, *ENDING_TAINTS], max_length=32),
    ]
    """Keys of node taints (NoSchedule or NoExecute) because of which a session is suspended and
    resumed on other nodes. `node.kubernetes.io/unschedulable` is a cordon. Sessions whose pods
    tolerate a taint stay. Without permission to list nodes this has no effect."""
    start_deadline_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 3600
    """How long, in seconds, the pods of a session may fail before the operator deletes them and
    marks the session as Failed (`StartFailed`). Pods fail if, for example, an image cannot be
    pulled, a container crashes repeatedly or runs out of memory, or a Secret is missing. Time spent
    waiting for nodes does not count."""
    max_restarts: Annotated[int, Field(ge=1, le=50)] = 10
    """Number of unexpected exits of a session's head within `restartWindowSeconds` after which the
    operator deletes the session's pods and marks it as Failed (`RestartLimit`). Its saved state is
    kept until it is retried."""
    restart_window_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 3600
    """Period, in seconds, over which `maxRestarts` counts."""


DEFAULT_SLOTS = 8
"""Default number of slots per cluster."""


class Pool(Part):
    """The clusters that the sessions of a BaseModel share (`sharing: Shared`)."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.minClusters <= self.maxClusters",
                "minClusters: must not exceed maxClusters",
            ),
        )
    )

    min_clusters: Annotated[int, Field(ge=0, le=100)] = 0
    """Number of clusters that always exist. With 1 or more, a new run does not wait for pods to
    start, as long as a slot is free."""
    max_clusters: Annotated[int, Field(ge=1, le=100)] = 1
    """Maximum number of clusters. Further runs wait for a slot (`PoolFull`)."""
    slots_per_cluster: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Number of sessions that a cluster serves at the same time, or fewer if its head measures that
    it has memory for fewer. Each keeps an adapter and its optimizer state in the memory of the
    trainers. If unset, it is the number of adapters of `limits.maxLoraRank` that fit alongside a
    micro-batch if `trainer.planning` describes the model and its GPUs, and 8 otherwise."""
    spare_slots: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of slots that are kept free while the pool is in use. If fewer are free, another
    cluster is started, before a run has to wait for it."""
    scale_up_after_seconds: Annotated[int, Field(ge=0, le=86_400)] = 30
    """How long, in seconds, a run waits for a slot before another cluster is started. If the pool
    has no cluster, one is started at once."""
    scale_down_after_seconds: Annotated[int, Field(ge=0, le=31_536_000)] = 900
    """How long, in seconds, a cluster without sessions is kept after it was last used."""

    @property
    def slots(self) -> int:
        """Number of slots of each cluster."""
        return self.slots_per_cluster or DEFAULT_SLOTS


class BaseModelSpec(Part):
    """A model that users can train and sample, and the pods that serve it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.pool) || self.sharing == 'Shared'",
                "pool: only valid with sharing Shared; set sharing to Shared, or remove pool",
            ),
            (
                "!has(self.warmSpares) || self.warmSpares == 0 || self.sharing == 'Dedicated'",
                "warmSpares: only valid with sharing Dedicated; use pool.minClusters and"
                " pool.spareSlots for a pool, or remove warmSpares",
            ),
            (
                "!has(self.sampler) || !self.sampler.colocated || self.trainer.gpusPerReplica >= 1",
                "sampler.colocated: requires trainers with GPUs; set trainer.gpusPerReplica",
            ),
            (
                "!has(self.sampler) || self.sampler.backend != 'sglang' || self.sampler.colocated"
                " || self.sampler.gpusPerReplica >= 1",
                "sampler.gpusPerReplica: must be 1 or more for sglang engines that are not"
                " colocated",
            ),
            (
                "!has(self.sampler) || self.sampler.backend != 'sglang' || !self.sampler.colocated"
                " || (self.sampler.gpusPerReplica >= 1"
                " && self.trainer.gpusPerReplica % self.sampler.gpusPerReplica == 0)",
                "sampler.gpusPerReplica: must divide trainer.gpusPerReplica, because colocated"
                " engines run inside the trainer pods",
            ),
            (
                "!has(self.sampler) || self.sampler.backend != 'sglang' || !self.sampler.colocated"
                " || self.sampler.replicas * self.sampler.gpusPerReplica"
                " == self.trainer.replicas * self.trainer.gpusPerReplica",
                "sampler.replicas: must be trainer.replicas x trainer.gpusPerReplica /"
                " sampler.gpusPerReplica, because colocated engines use all GPUs of the trainers",
            ),
            (
                "!has(self.sampler) || !has(self.sampler.engines)"
                " || !has(self.sampler.engines.processGroup)"
                " || self.sampler.engines.processGroup != 'nccl'"
                " || (self.trainer.replicas >= 1 && self.trainer.gpusPerReplica >= 1)",
                "sampler.engines.processGroup: nccl requires trainer pods with GPUs; set"
                " trainer.replicas and trainer.gpusPerReplica, or use gloo",
            ),
        )
    )

    model_name: Annotated[
        ModelName,
        Field(json_schema_extra=rules(("self == oldSelf", "is immutable; create a new BaseModel"))),
    ]
    """Name that SDK users request, such as `Qwen/Qwen3-8B`."""
    source: ModelSource
    """Where the weights come from."""
    max_context_length: Annotated[int, Field(ge=16, le=MAX_TOKENS)]
    """Maximum length of a sequence, in tokens. The model's own limit applies if it is lower:
    `max_position_embeddings`, extended by the factor of `rope_scaling`."""
    tokenizer: Text | None = None
    """Model ID from which clients load the tokenizer. Defaults to `modelName`."""
    head: HeadShape
    """The head pod of each session."""
    trainer: TrainerShape = TrainerShape()
    """The trainer pods of each session."""
    sampler: SamplerShape = SamplerShape()
    """The sampler pods of each session, or the external servers that replace them."""
    placement: Placement = Placement()
    """Where the pods of a session may run, and their labels and annotations."""
    sharing: Sharing = "Dedicated"
    """How the sessions of SDK users share pods. `Dedicated`: every session has its own pods.
    `Shared`: LoRA runs and samplers of all owners share the clusters of a pool; full fine-tuning
    still gets its own pods. A change applies to new sessions."""
    pool: Pool | None = None
    """Size of the pool. Only valid with `sharing: Shared`."""
    warm_spares: Annotated[int, Field(ge=0, le=100)] = 0
    """Number of clusters that are kept started, with the model loaded, for new LoRA runs with their
    own pods. A run that takes one over does not wait for pods to start, and another spare replaces
    it. Spares hold GPUs; they are deleted while a session waits for nodes or quota."""
    limits: Limits = Limits()
    """Limits for each session."""
    sessions: SessionPolicy = SessionPolicy()
    """Options and limits for the lifecycle and scheduling of sessions."""
    programs: Programs | None = None
    """Programs that sessions may run (`spec.program`). If unset, they may run none."""


class PoolStatus(Part):
    """What the pool of a BaseModel consists of, and what uses it."""

    clusters: Annotated[int, Field(ge=0)] = 0
    """Number of clusters, including those that are starting or stopping."""
    ready: Annotated[int, Field(ge=0)] = 0
    """Number of clusters that serve requests."""
    models: Annotated[int, Field(ge=0)] = 0
    """Number of sessions that have a place in a cluster."""
    slots: Annotated[int, Field(ge=0)] = 0
    """Number of sessions that all clusters together can serve."""
    slots_by_cluster: Annotated[
        dict[str, Annotated[int, Field(ge=0)]], Field(default_factory=dict, max_length=200)
    ]
    """Number of sessions that each cluster can serve, by name of its TrainingSession."""
    waiting: Annotated[int, Field(ge=0)] = 0
    """Number of sessions that wait for a place."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs that the clusters request."""
    cluster_summary: Annotated[str, Field(max_length=16)] = ""
    """Ready clusters and all clusters, such as `1/2`, for `kubectl get`."""
    slot_summary: Annotated[str, Field(max_length=16)] = ""
    """Sessions with a place and slots, such as `5/16`, for `kubectl get`."""


class SparesStatus(Part):
    """The warm spares of a BaseModel that no session has taken over."""

    ready: Annotated[int, Field(ge=0)] = 0
    """Number of spares that a session can take over at once."""
    clusters: Annotated[int, Field(ge=0)] = 0
    """Number of spares, including those that are starting or stopping."""
    taken: Annotated[int, Field(ge=0)] = 0
    """Number of clusters that sessions have taken over and still use."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs that the spares request. They are included in `gpus` of the BaseModel."""
    message: Message = ""
    """Why there are fewer spares than `warmSpares`, if anything prevents more."""
    summary: Annotated[str, Field(max_length=16)] = ""
    """Ready and wanted spares, such as `1/2`, for `kubectl get`."""


class BaseModelStatus(Part):
    """Most recently observed status. Set by the operator."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The `metadata.generation` that this status is based on."""
    conditions: Conditions
    """The conditions Ready, Reconciling and Stalled."""
    live_sessions: Annotated[int, Field(ge=0)] = 0
    """Number of sessions that have pods, or a place in the pool, or are waiting for them."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs that the pods of all sessions request."""
    idle: IdleGpus = IdleGpus()
    """Those of them that nobody uses, and the hours of that since the BaseModel was created."""
    pool: PoolStatus | None = None
    """The pool. Only set if there is one."""
    spares: SparesStatus | None = None
    """The warm spares. Only set if there are any, or `warmSpares` is set."""
