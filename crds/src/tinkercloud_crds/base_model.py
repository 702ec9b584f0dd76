"""BaseModel: what a platform offers to train and sample. `get_server_capabilities` lists these."""

from typing import Annotated

from pydantic import ConfigDict, Field

from tinkercloud_crds.conditions import Conditions
from tinkercloud_crds.placement import ObjectName, Placement
from tinkercloud_crds.shapes import (
    MAX_TOKENS,
    HeadShape,
    Idle,
    SamplerShape,
    Seconds,
    Text,
    TrainerShape,
)
from tinkercloud_crds.structural import IMMUTABLE, Part, rules

ModelName = Annotated[
    str,
    Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?$"),
]


class VolumeSource(Part):
    """A folder in Hugging Face layout on a volume, mounted read-only."""

    claim_name: ObjectName
    """The PersistentVolumeClaim."""
    path: Annotated[str, Field(max_length=512, pattern=r"^[^/].*$")]
    """The folder, relative to the volume's root."""


class ModelSource(Part):
    """Where the weights come from: exactly one."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.hub), has(self.volume), has(self.uri)].filter(x, x).size() == 1",
                "give exactly one of hub, volume and uri",
            ),
            (
                "!has(self.volume) || !self.volume.path.split('/').exists(part, part == '..')",
                "volume.path: must not leave the volume ('..')",
            ),
            (
                "!has(self.revision) || has(self.hub)",
                "revision: is of a model on the hub; leave it out, or give hub",
            ),
        )
    )

    hub: ModelName | None = None
    """A model id on the Hugging Face hub, downloaded when a head starts."""
    revision: (
        Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None
    ) = None
    """Commit, tag or branch of `hub`; absent means `main` as it is when each pod starts. A commit
    makes all pods, and a session before and after it was suspended, use the same weights."""
    volume: VolumeSource | None = None
    """A folder on a volume."""
    uri: Annotated[str, Field(max_length=1024, pattern=r"^(s3|gs|az)://.+$")] | None = None
    """A folder in an object store, downloaded when a head starts."""
    secret_name: ObjectName | None = None
    """Secret whose entries become environment variables of what downloads the model: HF_TOKEN, or
    the store's credentials."""


class Limits(Part):
    """Bounds on what one session may ask for."""

    max_lora_rank: Annotated[int, Field(ge=1, le=1024)] = 256
    """Rank of an adapter."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Upper bound of a session's `trainer.maxBatchTokens`; absent means the shape's own."""
    max_sessions_per_owner: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Live sessions of one owner; absent means any number. Further ones wait (`QuotaExceeded`)."""


class SessionPolicy(Part):
    """What a session, and so an SDK user through tags, may choose. It can shrink always."""

    queue_names: Annotated[list[ObjectName], Field(default_factory=list, max_length=64)]
    """LocalQueues a session may choose besides the BaseModel's own."""
    priority_class_names: Annotated[list[ObjectName], Field(default_factory=list, max_length=64)]
    """PriorityClasses a session may choose besides the BaseModel's own."""
    idle: Idle = Idle()
    """Of sessions that do not say."""
    max_idle_timeout_seconds: Seconds | None = None
    """Longest idle timeout a session may choose; absent means any."""
    max_lifetime_seconds: Seconds | None = None
    """Longest lifetime of a session, chosen or not; absent means any."""
    start_deadline_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 3600
    """How long a session whose pods can't run (an image that can't be pulled, a container that
    crashes again and again or needs more memory, a missing Secret) may keep its nodes without
    having been Ready. Then its pods go and it is Failed (`StartFailed`). Waiting for nodes doesn't
    count."""


class BaseModelSpec(Part):
    """What is offered, and with which pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.sampler) || !self.sampler.colocated || self.trainer.gpusPerReplica >= 1",
                "sampler.colocated: there are no trainer GPUs to share; set trainer.gpusPerReplica",
            ),
            (
                "!has(self.sampler) || self.sampler.backend != 'sglang' || self.sampler.colocated"
                " || self.sampler.gpusPerReplica >= 1",
                "sampler.gpusPerReplica: an sglang engine of its own needs 1 or more",
            ),
            (
                "!has(self.sampler) || self.sampler.backend != 'sglang' || !self.sampler.colocated"
                " || (self.sampler.gpusPerReplica >= 1"
                " && self.trainer.gpusPerReplica % self.sampler.gpusPerReplica == 0)",
                "sampler.gpusPerReplica: colocated engines lie within trainer pods; it must divide"
                " trainer.gpusPerReplica",
            ),
            (
                "!has(self.sampler) || self.sampler.backend != 'sglang' || !self.sampler.colocated"
                " || self.sampler.replicas * self.sampler.gpusPerReplica"
                " == self.trainer.replicas * self.trainer.gpusPerReplica",
                "sampler.replicas: colocated engines share all GPUs of the trainers; it must be"
                " trainer.replicas x trainer.gpusPerReplica / sampler.gpusPerReplica",
            ),
            (
                "!has(self.sampler) || !has(self.sampler.engines)"
                " || !has(self.sampler.engines.sharedMemory) || self.trainer.replicas == 1",
                "sampler.engines.sharedMemory: models lie in the memory of one trainer pod, which"
                " engines of others do not see; set trainer.replicas to 1, or leave it out",
            ),
            (
                "!has(self.sampler) || !has(self.sampler.engines)"
                " || !has(self.sampler.engines.processGroup)"
                " || self.sampler.engines.processGroup != 'nccl'"
                " || (self.trainer.replicas >= 1 && self.trainer.gpusPerReplica >= 1)",
                "sampler.engines.processGroup: nccl sends from a trainer's GPU; set"
                " trainer.gpusPerReplica, or gloo",
            ),
        )
    )

    model_name: Annotated[ModelName, Field(json_schema_extra=rules(IMMUTABLE))]
    """What SDK users ask for, such as `Qwen/Qwen3-8B`."""
    source: ModelSource
    """Where the weights come from."""
    max_context_length: Annotated[int, Field(ge=16, le=MAX_TOKENS)]
    """Tokens of the longest sequence. Sessions take no longer ones than the model's own
    `max_position_embeddings`, whatever this says."""
    tokenizer: Text | None = None
    """Model id under which clients find the tokenizer; modelName unless given."""
    head: HeadShape
    """The head pod."""
    trainer: TrainerShape = TrainerShape()
    """The trainer pods."""
    sampler: SamplerShape = SamplerShape()
    """The sampler pods."""
    placement: Placement = Placement()
    """Where the pods may run."""
    sharing: Annotated[str, Field(json_schema_extra={"enum": ["Dedicated"]})] = "Dedicated"
    """How sessions share pods. Dedicated: every session has its own."""
    limits: Limits = Limits()
    """Bounds on one session."""
    sessions: SessionPolicy = SessionPolicy()
    """What sessions may choose."""


class BaseModelStatus(Part):
    """What the operator has seen."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """`metadata.generation` this status is about."""
    conditions: Conditions
    """Ready, Reconciling, Stalled."""
    live_sessions: Annotated[int, Field(ge=0)] = 0
    """Sessions that have pods or want them."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs those sessions ask for."""
