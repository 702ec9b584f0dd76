"""BaseModel: a model that the platform offers. `get_server_capabilities` lists the ready ones."""

from typing import Annotated

from pydantic import ConfigDict, Field

from tinkercloud_crds.conditions import Conditions
from tinkercloud_crds.placement import ObjectName, Placement
from tinkercloud_crds.programs import Programs
from tinkercloud_crds.shapes import (
    MAX_TOKENS,
    HeadShape,
    Idle,
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
    start_deadline_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 3600
    """How long, in seconds, the pods of a session may fail before the operator deletes them and
    marks the session as Failed (`StartFailed`). Pods fail if, for example, an image cannot be
    pulled, a container crashes repeatedly or runs out of memory, or a Secret is missing. Time spent
    waiting for nodes does not count."""


class BaseModelSpec(Part):
    """A model that users can train and sample, and the pods that serve it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
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
                " || !has(self.sampler.engines.sharedMemory) || self.trainer.replicas == 1",
                "sampler.engines.sharedMemory: requires a single trainer pod, because engines in"
                " other pods cannot map its memory; set trainer.replicas to 1, or remove"
                " sharedMemory",
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
    """Maximum length of a sequence, in tokens. The model's own `max_position_embeddings` applies if
    it is lower."""
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
    sharing: Annotated[str, Field(json_schema_extra={"enum": ["Dedicated"]})] = "Dedicated"
    """How sessions share pods. `Dedicated`: every session has its own pods."""
    limits: Limits = Limits()
    """Limits for each session."""
    sessions: SessionPolicy = SessionPolicy()
    """Options and limits for the lifecycle and scheduling of sessions."""
    programs: Programs | None = None
    """Programs that sessions may run (`spec.program`). If unset, they may run none."""


class BaseModelStatus(Part):
    """Most recently observed status. Set by the operator."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The `metadata.generation` that this status is based on."""
    conditions: Conditions
    """The conditions Ready, Reconciling and Stalled."""
    live_sessions: Annotated[int, Field(ge=0)] = 0
    """Number of sessions that have pods or are waiting for them."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs that the pods of all sessions request."""
