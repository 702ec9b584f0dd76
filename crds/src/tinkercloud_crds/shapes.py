"""Parts of a BaseModel that describe pods: head, trainer, sampler, and their resources."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from tinkercloud_crds.extras import FOR_PODS, Environment, ExtendedResources
from tinkercloud_crds.placement import ObjectName, RolePlacement
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
    """CPU request. There is no CPU limit, so that idle cores can be used, unless the operator is
    configured to set one (`limit_cores`)."""
    memory: Quantity = "4Gi"
    """Memory request and limit."""
    shared_memory: Quantity = "1Gi"
    """Size of /dev/shm, which counts towards `memory`. Ray's object store uses four fifths of it.
    Model states pass through the store whole; states that do not fit are spilled to disk, which is
    slow."""
    scratch: Quantity = "8Gi"
    """Size of the local scratch volume. A downloaded model (`source.hub`, `source.uri`) is stored
    there in every pod that computes with it, so the model must fit. A pod that writes more is
    evicted and recreated repeatedly (`OutOfDisk`)."""


class Parallelism(Part):
    """How one copy of the model is divided over ranks. The remaining factor is data parallelism."""

    tensor: Size = 1
    """Number of tensor-parallel ranks, which share each weight matrix."""
    pipeline: Size = 1
    """Number of pipeline stages, each of which holds a range of layers."""
    context: Size = 1
    """Number of context-parallel ranks, which share each sequence."""
    expert: Size = 1
    """Number of expert-parallel ranks, which share the experts of a mixture-of-experts model."""


class Planning(Part):
    """Input of the planner, which chooses how the model is divided over GPUs."""

    gpu: Annotated[str, Field(max_length=32, pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$")]
    """GPU type of trainers and engines as `tinkercloud plan` names it, such as `H100` or `A100-40`;
    for other types the memory of one GPU, such as `48GiB`."""
    config: Annotated[str, Field(min_length=2, max_length=16384)]
    """Content of the model's `config.json`."""


class HeadShape(Part):
    """The head pod, which serves requests. Without trainer pods it also trains, on its CPU."""

    image: Image
    """Container image of the head. It must contain `tinkercloud_worker`."""
    resources: Resources = Resources()
    """Resources of the head's container."""
    placement: RolePlacement | None = None
    """Placement of the head's pod, where it differs from `placement`."""


class TrainerShape(Part):
    """The trainer pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.replicas == 0 ? self.gpusPerReplica + self.cpuRanksPerReplica == 0"
                " : (self.gpusPerReplica >= 1) != (self.cpuRanksPerReplica >= 1)",
                "replicas: with 0 (the head trains on its CPU), remove gpusPerReplica and"
                " cpuRanksPerReplica; with 1 or more, set exactly one of them",
            ),
            (
                "self.replicas == 0 || (self.replicas"
                " * (self.gpusPerReplica + self.cpuRanksPerReplica))"
                " % (self.parallelism.tensor * self.parallelism.pipeline"
                " * self.parallelism.context) == 0",
                "parallelism: tensor x pipeline x context must divide the ranks, replicas x"
                " gpusPerReplica (or cpuRanksPerReplica)",
            ),
            (
                "self.replicas == 0 || (self.replicas"
                " * (self.gpusPerReplica + self.cpuRanksPerReplica))"
                " % (self.parallelism.tensor * self.parallelism.pipeline"
                " * self.parallelism.expert) == 0",
                "parallelism: tensor x pipeline x expert must divide the ranks, replicas x"
                " gpusPerReplica (or cpuRanksPerReplica)",
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
                "planning: the operator chooses parallelism; remove parallelism, or planning",
            ),
            (
                "!has(self.planning) || self.dtype == 'bfloat16'",
                "planning: only supports dtype bfloat16; remove dtype, or planning",
            ),
            (
                "self.backend != 'megatron' || self.replicas >= 1",
                "backend: megatron trains in trainer pods; set replicas to 1 or more",
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
    """Number of trainer pods. 0 means that the head trains on its CPU."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=MAX_GPUS)] = 0
    """Number of GPUs per trainer pod, which is also its number of ranks: each rank has one GPU."""
    cpu_ranks_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of ranks per trainer pod without GPUs. Ranks are processes that train together and
    share the CPUs of the pod."""
    resources: Resources = Resources()
    """Resources of each trainer container, apart from GPUs."""
    placement: RolePlacement | None = None
    """Placement of the trainer pods, where it differs from `placement`."""
    extended_resources: ExtendedResources = ()
    """Extended resources that each trainer container requests, such as devices of a fast
    network."""
    environment: Environment = ()
    """Environment variables of each trainer container that configure NCCL, gloo and their
    transports."""
    parallelism: Parallelism = Parallelism()
    """How the model is divided over the ranks."""
    sharded: bool = False
    """Whether the ranks share one copy of the base model, and of models that are fully fine-tuned,
    as shards (FSDP2) instead of holding a copy each. The first trainer pod reads the base model for
    all ranks, so it needs enough memory for the whole model. Only for backend `torch`."""
    planning: Planning | None = None
    """If set, the operator chooses `parallelism` for each session and lowers `maxBatchTokens` to
    what fits in memory. `status.plan` of the session explains the choice."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the frozen base weights. Adapters, gradients and optimizer moments are always
    float32."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 8192
    """Maximum number of tokens per micro-batch on one data-parallel rank."""
    start_timeout_seconds: Seconds = 1800
    """How long, in seconds, the ranks in trainer pods may take from the head's request until each
    of them has been placed and has loaded its part of the model. After that the head reports what
    is missing, exits and is restarted. Collective operations have the same timeout, but at least
    half an hour."""

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
        )
    )

    adapters_claim_name: ObjectName | None = None
    """PersistentVolumeClaim that the head writes adapters to (and whole models, if they are fully
    fine-tuned) and that the engines read. It must be ReadWriteMany unless all pods run on one node.
    If absent, adapters stay in the head's scratch volume and reach the engines in requests."""
    gpu_memory_percent: Annotated[int, Field(ge=10, le=95)] | None = None
    """Percentage of the free memory of each GPU at startup that an engine uses for weights and
    cached prompts. If absent, SGLang chooses."""
    max_cached_tokens: Annotated[int, Field(ge=16, le=1 << 30)] | None = None
    """Maximum number of tokens of cached prompts per engine, even if more would fit in memory. If
    absent, only `gpuMemoryPercent` limits the cache."""
    lora_target_modules: (
        Annotated[
            list[Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9_]+$")]],
            Field(min_length=1, max_length=32),
        ]
        | None
    ) = None
    """Modules that adapters may target, by SGLang's names (`--lora-target-modules`). If absent, all
    modules may be targeted. An engine that accepts adapters on experts cannot load full expert
    weights, so leave the experts out when mixture-of-experts models are fully fine-tuned."""
    device_class_name: ObjectName | None = None
    """DeviceClass of the trainers' GPUs, such as `gpu.nvidia.com`. Required for colocated engines:
    the containers of a pod share GPUs through a ResourceClaim (resource.k8s.io/v1)."""
    start_timeout_seconds: Seconds = 1800
    """How long, in seconds, an engine may take to load the base model before it is restarted. If
    all engines are lost, requests wait for one to return for the same time."""
    process_group: Literal["gloo", "nccl"] | None = None
    """Backend of a torch process group that sends fully fine-tuned models to each engine; other
    transports are the fallback. If absent, there is no group. The sender is the pod of the
    trainer's first rank, or the head if the head trains; `gloo` sends from its CPU and `nccl` from
    the rank's GPU. Each engine costs the sender 0.3 GiB of memory, and during a transfer 256 MiB,
    or the size of the largest tensor if that is larger; `nccl` needs the same on the GPU, and a
    CUDA context. Not valid for colocated engines."""
    shared_memory: Literal["cpu", "cuda"] | None = None
    """Shared memory that passes fully fine-tuned models to colocated engines of a single trainer
    pod; other transports are the fallback. If absent, shared memory is not used. `cpu`: `/dev/shm`
    of the pod; `trainer.resources.sharedMemory` must leave room for 512 MiB, and for twice the
    largest tensor. `cuda`: memory of the first rank's GPU (CUDA IPC), which needs the same room
    there, and a CUDA context."""


class ExternalServers(Part):
    """Running inference servers that are operated outside Tinkercloud."""

    kind: Literal["sglang", "vllm"]
    """Software that the servers run."""
    urls: Annotated[
        list[Annotated[str, Field(max_length=253, pattern=r"^https?://[A-Za-z0-9.-]+(:[0-9]+)?$")]],
        Field(min_length=1, max_length=64),
    ]
    """URLs of the servers, `http://host:port`. All of them must serve the same base model."""
    model: Text | None = None
    """Name of the base model in vLLM. Defaults to `modelName`."""
    key_secret_name: ObjectName | None = None
    """Secret whose entry `key` is the API key of the servers, if they require one."""
    adapters_claim_name: ObjectName
    """PersistentVolumeClaim that the head writes adapters to and that the servers read."""
    adapters_folder: Annotated[str, Field(max_length=512, pattern=r"^/.+$")]
    """Path at which the servers mount that volume."""


class SamplerShape(Part):
    """The sampler pods, or the servers used instead of them."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.backend == 'sglang' ? self.replicas >= 1 : self.replicas == 0",
                "replicas: must be 1 or more for backend sglang, and 0 for torch (the head samples)"
                " and"
                " external (the servers are not pods of a session)",
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
                " it,"
                " or set backend to torch",
            ),
            (
                "!has(self.engines) || self.backend == 'sglang'",
                "engines: only valid for backend sglang; remove it",
            ),
            (
                "self.backend != 'sglang' || self.colocated"
                " == (has(self.engines) && has(self.engines.deviceClassName))",
                "engines.deviceClassName: required for colocated engines, which share GPUs through"
                " a"
                " DeviceClass, and not valid for others; set colocated and deviceClassName, or"
                " neither",
            ),
            (
                "!self.colocated || !has(self.engines) || !has(self.engines.processGroup)",
                "engines.processGroup: not valid for colocated engines; remove it",
            ),
            (
                "self.colocated || !has(self.engines) || !has(self.engines.sharedMemory)",
                "engines.sharedMemory: only valid for colocated engines; remove it, or set"
                " engines.processGroup",
            ),
            (
                f"self.backend != 'sglang' || (has(self.image) && self.replicas <= {MAX_ENGINES})",
                "image, replicas: backend sglang needs an image that contains SGLang, and at most"
                f" {MAX_ENGINES} engines; set image, and lower replicas if they exceed it",
            ),
            FOR_PODS,
            PLACED_PODS,
        )
    )

    backend: Literal["torch", "sglang", "external"] = "torch"
    """Sampling engine. `torch`: the head samples with the trainer's weights. `sglang`: SGLang
    engines run in pods of their own, or `colocated` in the trainer pods. `external`: running
    servers that are operated outside Tinkercloud."""
    sampled_logprobs: Literal["model", "tempered"] = "model"
    """Logprobs that are returned with sampled tokens. `model`: logprobs under the model's own
    distribution, at any temperature. `tempered`: logprobs under the distribution at the request's
    temperature, before top-k and top-p; only for backend `torch`."""
    image: Image | None = None
    """Container image of the engines. It must contain SGLang."""
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """Number of engines: sampler pods with one engine each, or colocated engines in the trainer
    pods."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=MAX_GPUS)] = 0
    """Number of GPUs per engine."""
    resources: Resources = Resources()
    """Resources of each engine's container, apart from GPUs."""
    placement: RolePlacement | None = None
    """Placement of the sampler pods, where it differs from `placement`. Colocated engines run in
    the trainer pods."""
    extended_resources: ExtendedResources = ()
    """Extended resources that each engine's container requests."""
    environment: Environment = ()
    """Environment variables of each engine's container that configure NCCL and its transports."""
    colocated: bool = False
    """Whether the engines share the trainers' GPUs instead of having GPUs of their own."""
    engines: EnginesShape | None = None
    """Settings of the engines of backend `sglang`. Defaults to `{}`, which applies the default of
    each field."""
    external: ExternalServers | None = None
    """The servers of backend `external`."""

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
    """What happens to a session that nobody uses."""

    timeout_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 3600
    """Time without requests, in seconds, after which the session is idle."""
    action: Literal["Suspend", "Delete"] = "Suspend"
    """`Suspend`: the session's state is saved, its pods are deleted, and the next request resumes
    it. `Delete`: a last checkpoint is saved and the session is deleted; a session that was
    declared, not created by the API server, becomes Finished and is kept."""
