"""Parts of a BaseModel that describe pods: head, trainer, sampler, and their resources."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from tinkercloud_crds.pods.extras import FOR_PODS, Environment, ExtendedResources
from tinkercloud_crds.pods.placement import ObjectName, RolePlacement
from tinkercloud_crds.structural import Part, rules

Text = Annotated[str, Field(max_length=253)]
Message = Annotated[str, Field(max_length=1024)]
Image = Annotated[str, Field(min_length=1, max_length=512)]
Quantity = Annotated[
    str, Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$")
]
Size = Annotated[int, Field(ge=1, le=4096)]
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
MAX_GPUS = 16
"""Maximum number of GPUs per pod."""
MAX_REPLICAS = 512
"""Maximum number of trainer pods per session."""
MAX_ENGINES = 64
"""Maximum number of engines per session, in sampler pods or in containers of trainer pods."""
ADAPTER_SLOTS = 3
"""Number of adapters that an engine samples with at a time and keeps on its GPUs; the base model
counts as one."""
OBJECT_STORE_SHARE = 0.8
"""Share of /dev/shm that Ray's object store uses; model states pass through it."""
JOURNALS_SHARE = 0.2
"""Share of a head's scratch space for all journals and the snapshots of adapters; half of it if the
base model is stored there too."""
JOURNAL_SHARE = 0.05
"""The same for the journal of one run, at which a snapshot replaces it."""
WHOLE_MODEL_SHARE = 0.6
"""Share of the scratch space of a head that trains a whole model for that model's two snapshots:
the last one, and the one that replaces it."""
MAX_TOKENS = 1 << 22
"""Maximum number of tokens in a sequence or a micro-batch."""


PLACED_PODS = (
    "!has(self.placement) || self.replicas >= 1",
    "placement: only valid if this role has pods; remove it, or set replicas",
)
"""Rule of a shape whose pods have a placement of their own."""


class Resources(Part):
    """Resources of one container. Requests and limits are equal for memory and GPUs."""

    cpu: Quantity = "1"
    """CPU request. There is no CPU limit by default, so containers can use idle cores. The operator
    setting `limit_cores` adds a limit equal to the request."""
    memory: Quantity = "4Gi"
    """Memory request and limit."""
    shared_memory: Quantity = "1Gi"
    """Size of /dev/shm. It counts towards `memory`. Ray's object store uses 80% of it and should
    have room for a complete model state: larger states are spilled to disk, which is slow."""
    scratch: Quantity = "8Gi"
    """Size of the local scratch volume. It must have room for a downloaded model (`source.hub`,
    `source.uri`), because every pod that uses the model stores a copy. A pod that exceeds the size
    is evicted and recreated repeatedly (`OutOfDisk`)."""


class Parallelism(Part):
    """How to split one copy of the model across ranks. The other ranks train in data parallel."""

    tensor: Size = 1
    """Number of tensor-parallel ranks, which share each weight matrix."""
    pipeline: Size = 1
    """Number of pipeline stages, each of which holds a range of layers."""
    context: Size = 1
    """Number of context-parallel ranks, which share each sequence."""
    expert: Size = 1
    """Number of expert-parallel ranks, which share the experts of a mixture-of-experts model."""


class Planning(Part):
    """Input of the planner, which chooses how to split the model across GPUs."""

    gpu: Annotated[str, Field(max_length=32, pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$")]
    """GPU type of the trainers and engines, as in `tinkercloud plan`: for example `H100` or
    `A100-40`. For other types, set the memory of one GPU, such as `48GiB`."""
    config: Annotated[str, Field(min_length=2, max_length=16384)]
    """Contents of the model's `config.json`."""


class Autosave(Part):
    """When the head saves its models by itself, so that a head that is killed does not lose them.

    The two latest automatic checkpoints of each model are kept.
    """

    steps: Annotated[int, Field(ge=0, le=1_000_000)] = 50
    """Number of optimizer steps after which a model is saved. 0: steps are not counted."""
    seconds: Annotated[int, Field(ge=0, le=31_536_000)] = 300
    """Time, in seconds, after which a step is saved even if fewer than `steps` have followed. 0: no
    limit. If `steps` is 0 too, nothing is saved automatically."""
    whole_models: bool = False
    """Whether to save fully fine-tuned models as well. Each save writes 12 bytes per parameter, and
    takes twice as much memory in the head while it is written."""


class Durability(Part):
    """What survives when the head is killed, at any moment.

    Training continues where it was, with the same request ids and results.
    """

    level: Literal["none", "local", "remote"] = "local"
    """`none`: what the last checkpoint has. `local`: everything, if the container is restarted in
    its pod; the journal is in the pod's scratch space. `remote`: everything, even if the pod or its
    node is lost; each request is copied to the checkpoint store before it is confirmed."""
    wait_for_store: bool = True
    """With `remote`: whether each request waits for the checkpoint store. If false, a lost pod
    loses the requests of the last second."""


class HeadShape(Part):
    """The head pod, which serves requests. Without trainer pods it also trains, on its CPU."""

    image: Image
    """Container image of the head. It must contain `tinkercloud_worker`."""
    resources: Resources = Resources()
    """Resources of the head's container."""
    placement: RolePlacement | None = None
    """Overrides of `placement` for the head pod."""
    autosave: Autosave = Autosave()
    """Automatic checkpoints."""
    suspend_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """How long, in seconds, a stopping head may take to save its models. `tinkercloud plan`
    estimates it. Defaults to an estimate from `trainer.planning`, or else to the operator's
    setting."""
    durability: Durability = Durability()
    """What survives when the head is killed."""


class TrainerShape(Part):
    """The trainer pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.replicas == 0 ? self.gpusPerReplica + self.cpuRanksPerReplica == 0"
                " : (self.gpusPerReplica >= 1) != (self.cpuRanksPerReplica >= 1)",
                "replicas: if 0, the head trains on its CPU: remove gpusPerReplica and"
                " cpuRanksPerReplica; if 1 or more, set exactly one of them",
            ),
            (
                "self.replicas == 0 || (self.replicas"
                " * (self.gpusPerReplica + self.cpuRanksPerReplica))"
                " % (self.parallelism.tensor * self.parallelism.pipeline"
                " * self.parallelism.context) == 0",
                "parallelism: tensor x pipeline x context must divide the number of ranks, which is"
                " replicas x gpusPerReplica (or cpuRanksPerReplica)",
            ),
            (
                "self.replicas == 0 || (self.replicas"
                " * (self.gpusPerReplica + self.cpuRanksPerReplica))"
                " % (self.parallelism.tensor * self.parallelism.pipeline"
                " * self.parallelism.expert) == 0",
                "parallelism: tensor x pipeline x expert must divide the number of ranks, which is"
                " replicas x gpusPerReplica (or cpuRanksPerReplica)",
            ),
            (
                "self.backend != 'torch' || self.parallelism.tensor"
                " * self.parallelism.pipeline * self.parallelism.context"
                " * self.parallelism.expert == 1",
                "parallelism: not supported by backend torch; remove it, or set backend to"
                " megatron",
            ),
            (
                "!self.sharded || (self.backend == 'torch' && self.replicas >= 1)",
                "sharded: only valid for backend torch with trainer pods; remove it",
            ),
            (
                "!has(self.planning) || (self.backend == 'megatron' && self.gpusPerReplica >= 1)",
                "planning: only valid for backend megatron with gpusPerReplica; set both, or remove"
                " it",
            ),
            (
                "!has(self.planning) || self.parallelism.tensor * self.parallelism.pipeline"
                " * self.parallelism.context * self.parallelism.expert == 1",
                "planning: not valid with parallelism, because the operator chooses it; remove one"
                " of them",
            ),
            (
                "!has(self.planning) || self.dtype == 'bfloat16'",
                "planning: requires dtype bfloat16; remove dtype or planning",
            ),
            (
                "self.backend != 'megatron' || self.replicas >= 1",
                "backend: megatron requires trainer pods; set replicas to 1 or more",
            ),
            FOR_PODS,
            PLACED_PODS,
        )
    )

    backend: Literal["torch", "megatron"] = "torch"
    """Training engine."""
    image: Image | None = None
    """Container image of the trainer pods. Defaults to the head's image."""
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """Number of trainer pods. If 0, the head trains on its CPU."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=MAX_GPUS)] = 0
    """Number of GPUs per trainer pod. The pod runs one rank per GPU."""
    cpu_ranks_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of ranks (training processes) per trainer pod without GPUs. They share the CPUs of the
    pod."""
    resources: Resources = Resources()
    """Resources of each trainer container, excluding GPUs."""
    placement: RolePlacement | None = None
    """Overrides of `placement` for the trainer pods."""
    extended_resources: ExtendedResources = ()
    """Extended resources that each trainer container requests, such as RDMA devices."""
    environment: Environment = ()
    """Environment variables of each trainer container, to configure NCCL, Gloo and their
    transports."""
    parallelism: Parallelism = Parallelism()
    """How to split the model across the ranks."""
    sharded: bool = False
    """Whether to shard the base model and fully fine-tuned models across the ranks (FSDP2). If
    false, each rank holds a full copy. The first trainer pod reads the base model for all ranks, so
    it needs enough memory for the whole model. Only for backend `torch`."""
    planning: Planning | None = None
    """If set, the operator chooses `parallelism` for each session, and lowers `maxBatchTokens` if
    the micro-batches would not fit in memory. The session's `status.plan` explains the choice."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the frozen base weights. Adapters, gradients and optimizer moments are always
    float32."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 8192
    """Maximum number of tokens per micro-batch on one data-parallel rank."""
    start_timeout_seconds: Seconds = 1800
    """Timeout, in seconds, for all ranks to be scheduled and to load their part of the model. When
    it expires, the head reports which ranks are missing, exits and is restarted. Collective
    operations use the same timeout, but at least 30 minutes."""

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks per trainer pod."""
        return self.gpus_per_replica or self.cpu_ranks_per_replica


class EnginesShape(Part):
    """Settings of engines in sampler pods, or of engines colocated with the trainers."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.loraTargetModules) || !self.loraTargetModules.exists(m, m == 'all')",
                "loraTargetModules: 'all' is not a module name; remove the field to target all"
                " modules",
            ),
            (
                "has(self.minReplicas) == has(self.maxReplicas)",
                "minReplicas, maxReplicas: set both, or neither",
            ),
            (
                "!has(self.minReplicas) || !has(self.maxReplicas)"
                " || self.minReplicas <= self.maxReplicas",
                "minReplicas: must not exceed maxReplicas",
            ),
        )
    )

    min_replicas: Annotated[int, Field(ge=1, le=MAX_ENGINES)] | None = None
    """Minimum number of engines, if their number follows the load. The session is Ready with this
    number. Replaces `sampler.replicas`, together with `maxReplicas`."""
    max_replicas: Annotated[int, Field(ge=1, le=MAX_ENGINES)] | None = None
    """Maximum number of engines, if their number follows the load. Not valid for colocated engines,
    nor with a queue of Kueue, which restarts a session whose number of pods changes."""
    target_samples: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Number of samples in progress, waiting ones included, per engine. Only used with
    `maxReplicas`."""
    scale_up_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """How long, in seconds, the load must need more engines before they are started."""
    scale_down_seconds: Annotated[int, Field(ge=10, le=86_400)] = 600
    """How long, in seconds, fewer engines must suffice before surplus ones are drained and
    removed."""
    adapters_claim_name: ObjectName | None = None
    """PersistentVolumeClaim to which the head writes adapters and fully fine-tuned models for the
    engines. It must be ReadWriteMany unless all pods run on one node. If unset, the head keeps
    adapters in its scratch volume and sends them to the engines in requests."""
    gpu_memory_percent: Annotated[int, Field(ge=10, le=95)] | None = None
    """Percentage of each GPU's free memory that an engine reserves at startup for weights and
    cached prompts. If unset, SGLang chooses."""
    max_cached_tokens: Annotated[int, Field(ge=16, le=1 << 30)] | None = None
    """Maximum number of tokens of cached prompts per engine. If unset, only `gpuMemoryPercent`
    limits the cache."""
    lora_target_modules: (
        Annotated[
            list[Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9_]+$")]],
            Field(min_length=1, max_length=32),
        ]
        | None
    ) = None
    """Modules that adapters may target, as in SGLang's `--lora-target-modules`. If unset, adapters
    may target all modules. An engine that accepts adapters for experts cannot load full expert
    weights, so exclude the experts if users fully fine-tune mixture-of-experts models."""
    device_class_name: ObjectName | None = None
    """DeviceClass of the trainers' GPUs, such as `gpu.nvidia.com`. Required for colocated engines:
    the containers of a pod share GPUs through a ResourceClaim (resource.k8s.io/v1)."""
    start_timeout_seconds: Seconds = 1800
    """Timeout, in seconds, for an engine to load the base model. When it expires, the engine is
    restarted. If all engines fail, requests wait for an engine for the same time."""
    process_group: Literal["gloo", "nccl"] | None = None
    """Backend of the torch process group that sends fully fine-tuned models to each engine. If
    unset, or if a transfer fails, other transports are used. The sender is the pod of the trainer's
    first rank, or the head if the head trains. `gloo` sends from the CPU, `nccl` from the GPU of
    the rank. For each engine, the sender needs 0.3 GiB of memory and, during a transfer, another
    256 MiB or the size of the largest tensor, whichever is larger. `nccl` also needs the same
    amount of GPU memory and a CUDA context. Not valid for colocated engines."""


class ExternalServers(Part):
    """Existing inference servers that are managed outside Tinkercloud."""

    kind: Literal["sglang", "vllm"]
    """Type of the servers."""
    urls: Annotated[
        list[Annotated[str, Field(max_length=253, pattern=r"^https?://[A-Za-z0-9.-]+(:[0-9]+)?$")]],
        Field(min_length=1, max_length=64),
    ]
    """URLs of the servers, such as `http://host:port`. All servers must serve the same base
    model."""
    model: Text | None = None
    """Name of the base model in vLLM. Defaults to `modelName`."""
    key_secret_name: ObjectName | None = None
    """Secret whose entry `key` is the API key of the servers, if they require one."""
    adapters_claim_name: ObjectName
    """PersistentVolumeClaim to which the head writes adapters for the servers."""
    adapters_folder: Annotated[str, Field(max_length=512, pattern=r"^/.+$")]
    """Path at which the servers mount that volume."""


_SCALED = "has(self.engines) && has(self.engines.maxReplicas)"
"""Condition of a sampler whose number of engines follows the load."""


def _or_scaled(rule: tuple[str, str]) -> tuple[str, str]:
    """Return a rule for shapes with worker pods, which samplers with engines that scale have."""
    condition, message = rule
    return f"{_SCALED} || {condition}", message


class SamplerShape(Part):
    """The sampler pods, or the external servers that replace them."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"self.backend == 'sglang' ? (self.replicas >= 1) != ({_SCALED})"
                " : self.replicas == 0",
                "replicas: must be 0 for backends torch (the head samples) and external (the"
                " servers are not pods of the session); for sglang, set either replicas to 1 or"
                " more, or engines.minReplicas and engines.maxReplicas",
            ),
            (
                f"!self.colocated || !({_SCALED})",
                "engines.maxReplicas: not valid for colocated engines, whose number follows from"
                " the trainers; remove it and minReplicas, and set replicas",
            ),
            (
                "(self.backend == 'external') == has(self.external)",
                "external: required for backend external, and not valid for others",
            ),
            (
                "self.backend != 'external' || (!self.colocated && self.gpusPerReplica == 0)",
                "gpusPerReplica, colocated: not valid for backend external; remove both",
            ),
            (
                "self.sampledLogprobs == 'model' || self.backend == 'torch'",
                "sampledLogprobs: inference servers only return the model's own logprobs; remove"
                " it, or set backend to torch",
            ),
            (
                "!has(self.engines) || self.backend == 'sglang'",
                "engines: only valid for backend sglang; remove it",
            ),
            (
                "self.backend != 'sglang' || self.colocated"
                " == (has(self.engines) && has(self.engines.deviceClassName))",
                "engines.deviceClassName: required for colocated engines, which share GPUs through"
                " a DeviceClass, and not valid for others; set both colocated and"
                " deviceClassName, or neither",
            ),
            (
                "!self.colocated || !has(self.engines) || !has(self.engines.processGroup)",
                "engines.processGroup: not valid for colocated engines; remove it",
            ),
            (
                f"self.backend != 'sglang' || (has(self.image) && self.replicas <= {MAX_ENGINES})",
                "image, replicas: backend sglang requires an image with SGLang and at most"
                f" {MAX_ENGINES} replicas; set image, and lower replicas if necessary",
            ),
            _or_scaled(FOR_PODS),
            _or_scaled(PLACED_PODS),
        )
    )

    backend: Literal["torch", "sglang", "external"] = "torch"
    """Sampling engine. `torch`: the head samples with the trainer's weights. `sglang`: SGLang
    engines run in their own pods or, if `colocated`, in the trainer pods. `external`: existing
    servers that are managed outside Tinkercloud."""
    sampled_logprobs: Literal["model", "tempered"] = "model"
    """Type of logprobs returned with sampled tokens. `model`: logprobs under the model's own
    distribution, at any temperature. `tempered`: logprobs under the distribution at the request's
    temperature, before top-k and top-p; only for backend `torch`."""
    image: Image | None = None
    """Container image of the engines. It must contain SGLang."""
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """Number of engines: sampler pods with one engine each, or colocated engines in the trainer
    pods. 0 if the number follows the load (`engines.minReplicas`)."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=MAX_GPUS)] = 0
    """Number of GPUs per engine."""
    resources: Resources = Resources()
    """Resources of each engine's container, excluding GPUs."""
    placement: RolePlacement | None = None
    """Overrides of `placement` for the sampler pods. Has no effect on colocated engines, which run
    in the trainer pods."""
    extended_resources: ExtendedResources = ()
    """Extended resources that each engine's container requests."""
    environment: Environment = ()
    """Environment variables of each engine's container, to configure NCCL and its transports."""
    colocated: bool = False
    """Whether the engines share the GPUs of the trainers instead of using their own."""
    engines: EnginesShape | None = None
    """Settings of the engines for backend `sglang`. Defaults to `{}`."""
    external: ExternalServers | None = None
    """The servers for backend `external`."""

    @property
    def is_scaled(self) -> bool:
        """Whether the number of engines follows the load."""
        return self.engines is not None and self.engines.max_replicas is not None

    @property
    def least_replicas(self) -> int:
        """Minimum number of engines."""
        scaled = self.engines.min_replicas if self.engines is not None else None
        return scaled if scaled is not None else self.replicas

    @property
    def most_replicas(self) -> int:
        """Maximum number of engines."""
        scaled = self.engines.max_replicas if self.engines is not None else None
        return scaled if scaled is not None else self.replicas

    @model_validator(mode="before")
    @classmethod
    def _engines_of_sglang(cls, given: object) -> object:
        """Set `engines` exactly if the backend is sglang."""
        if not isinstance(given, Mapping):
            return given
        engines = given.get("engines")
        has_engines = given.get("backend") == "sglang"
        return {
            **given,
            "engines": (engines if engines is not None else {}) if has_engines else None,
        }


class Idle(Part):
    """What to do when a session receives no requests."""

    timeout_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 3600
    """How long, in seconds, a session must receive no requests to be considered idle."""
    action: Literal["Suspend", "Delete"] = "Suspend"
    """What to do with an idle session. `Suspend` saves its state and deletes its pods; the next
    request resumes it. `Delete` saves a final checkpoint and deletes the session. A session from
    your own manifest, not from the API server, is not deleted but becomes Finished."""
