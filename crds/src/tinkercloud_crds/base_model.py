"""BaseModel: a model that the platform offers. `get_server_capabilities` lists the ready ones."""

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
    """Name of the PersistentVolumeClaim."""
    path: Annotated[str, Field(max_length=512, pattern=r"^[^/].*$")]
    """Path of the folder, relative to the root of the volume."""


class ModelSource(Part):
    """Where the weights come from. Set exactly one of hub, volume and uri."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.hub), has(self.volume), has(self.uri)].filter(x, x).size() == 1",
                "set exactly one of hub, volume and uri",
            ),
            (
                "!has(self.volume) || !self.volume.path.split('/').exists(part, part == '..')",
                "volume.path: must not leave the volume ('..')",
            ),
            (
                "!has(self.revision) || has(self.hub)",
                "revision: only valid with hub; remove it, or set hub",
            ),
        )
    )

    hub: ModelName | None = None
    """Model id on the Hugging Face Hub. The model is downloaded when a pod starts."""
    revision: (
        Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None
    ) = None
    """Commit, tag or branch of `hub`. If absent, each pod loads `main` as it is when the pod
    starts. Pin a commit so that all pods use the same weights, also after a session was suspended
    and resumed."""
    volume: VolumeSource | None = None
    """A folder on a volume."""
    uri: Annotated[str, Field(max_length=1024, pattern=r"^(s3|gs|az)://.+$")] | None = None
    """URL of a folder in an object store. The model is downloaded when a pod starts."""
    secret_name: ObjectName | None = None
    """Secret whose entries become environment variables of the container that downloads the model,
    such as HF_TOKEN or the credentials of the object store."""


class Limits(Part):
    """Upper bounds on what one session may request."""

    max_lora_rank: Annotated[int, Field(ge=1, le=1024)] = 256
    """Maximum rank of an adapter."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Maximum of a session's `trainer.maxBatchTokens`. If absent, the BaseModel's own
    `trainer.maxBatchTokens` is the maximum."""
    max_sessions_per_owner: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Maximum number of live sessions per owner; further sessions wait (`QuotaExceeded`). If
    absent, the number is not limited."""


class SessionPolicy(Part):
    """What a session, and therefore an SDK user through tags, may choose."""

    queue_names: Annotated[list[ObjectName], Field(default_factory=list, max_length=64)]
    """LocalQueues that a session may choose in addition to the BaseModel's own."""
    priority_class_names: Annotated[list[ObjectName], Field(default_factory=list, max_length=64)]
    """PriorityClasses that a session may choose in addition to the BaseModel's own."""
    idle: Idle = Idle()
    """Idle policy of sessions that do not set `spec.idle`."""
    max_idle_timeout_seconds: Seconds | None = None
    """Longest idle timeout, in seconds, that a session may choose. If absent, the timeout is not
    limited."""
    max_lifetime_seconds: Seconds | None = None
    """Longest lifetime of a session, in seconds, whether or not the session sets one. If absent,
    the lifetime is not limited."""
    start_deadline_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 3600
    """How long, in seconds, a session may hold its nodes without becoming Ready because its pods
    fail to run: an image cannot be pulled, a container crashes repeatedly or runs out of memory, or
    a Secret is missing. After that its pods are deleted and the session is Failed (`StartFailed`).
    Time spent waiting for nodes does not count."""


class BaseModelSpec(Part):
    """A model that is offered for training and sampling, and the pods that serve it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.sampler) || !self.sampler.colocated || self.trainer.gpusPerReplica >= 1",
                "sampler.colocated: the trainers have no GPUs to share; set trainer.gpusPerReplica",
            ),
            (
                "!has(self.sampler) || self.sampler.backend != 'sglang' || self.sampler.colocated"
                " || self.sampler.gpusPerReplica >= 1",
                "sampler.gpusPerReplica: an sglang engine in a pod of its own needs 1 or more",
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
                " other"
                " pods cannot map its memory; set trainer.replicas to 1, or remove sharedMemory",
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

    model_name: Annotated[ModelName, Field(json_schema_extra=rules(IMMUTABLE))]
    """Name that SDK users request, such as `Qwen/Qwen3-8B`."""
    source: ModelSource
    """Where the weights come from."""
    max_context_length: Annotated[int, Field(ge=16, le=MAX_TOKENS)]
    """Maximum length of a sequence, in tokens. The model's own `max_position_embeddings` applies if
    it is lower."""
    tokenizer: Text | None = None
    """Model id under which clients find the tokenizer. Defaults to modelName."""
    head: HeadShape
    """The head pod of each session."""
    trainer: TrainerShape = TrainerShape()
    """The trainer pods of each session."""
    sampler: SamplerShape = SamplerShape()
    """The sampler pods of each session, or the servers used instead of them."""
    placement: Placement = Placement()
    """Where the pods may run."""
    sharing: Annotated[str, Field(json_schema_extra={"enum": ["Dedicated"]})] = "Dedicated"
    """How sessions share pods. `Dedicated`: every session has its own pods."""
    limits: Limits = Limits()
    """Upper bounds on what one session may request."""
    sessions: SessionPolicy = SessionPolicy()
    """What sessions may choose."""


class BaseModelStatus(Part):
    """The status that the operator last observed."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The `metadata.generation` that this status describes."""
    conditions: Conditions
    """Conditions of types Ready, Reconciling and Stalled."""
    live_sessions: Annotated[int, Field(ge=0)] = 0
    """Number of sessions that have pods or are waiting for them."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs that these sessions request."""
