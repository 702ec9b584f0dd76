"""Parts that both resources use: worker shapes, parallelism, placement, limits, idleness."""

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
"""GPUs of a pod."""
MAX_REPLICAS = 512
"""Trainer pods of a session."""
MAX_ENGINES = 64
"""Engines of a session: sampler pods, or containers of trainer pods."""
ADAPTER_SLOTS = 3
"""Adapters that an engine draws with at a time, and has room for on its GPUs; the base is one."""
OBJECT_STORE_SHARE = 0.8
"""Of /dev/shm, what Ray's store of objects has, through which states of models pass."""
MAX_TOKENS = 1 << 22
"""Tokens of a sequence, or of a micro-batch."""


PLACED_PODS = (
    "!has(self.placement) || self.replicas >= 1",
    "placement: is for pods of this role, of which there are none; leave it out, or set replicas",
)
"""Rule of a shape whose pods have a placement of their own."""


class Resources(Part):
    """What one container needs. Requests and limits are equal for memory and GPUs."""

    cpu: Quantity = "1"
    """Cores requested; there is no limit, so that idle cores are used, unless the operator is
    configured with one (`limit_cores`)."""
    memory: Quantity = "4Gi"
    """Memory requested, and its limit."""
    shared_memory: Quantity = "1Gi"
    """Size of /dev/shm, taken from `memory`. Four fifths are Ray's; states of models pass through
    there as a whole, and by a slow way on the disk if they don't fit."""
    scratch: Quantity = "8Gi"
    """Size of the local scratch volume. A model that is downloaded (`source.hub`, `source.uri`)
    lies there and must fit, in each pod that computes with it: a pod that writes more is ended, and
    made again, without end (`OutOfDisk`)."""


class Parallelism(Part):
    """How one copy of the model is split over ranks; data parallelism is what is left."""

    tensor: Size = 1
    """Ranks that share each matrix."""
    pipeline: Size = 1
    """Stages of layers."""
    context: Size = 1
    """Ranks that share a sequence."""
    expert: Size = 1
    """Ranks that share the experts of a mixture."""


class Planning(Part):
    """What the operator needs to know to choose how a model is split."""

    gpu: Annotated[str, Field(max_length=32, pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$")]
    """Kind of the trainers' and the engines' GPUs as `tinkercloud plan` knows it, such as `H100` or
    `A100-40`; of any other, its memory: `48GiB`."""
    config: Annotated[str, Field(min_length=2, max_length=16384)]
    """Content of the model's `config.json`."""


class HeadShape(Part):
    """The head pod: the ASGI process, and with the `torch` backend on CPU the engine as well."""

    image: Image
    """Container image; it holds `tinkercloud_worker`."""
    resources: Resources = Resources()
    """What the head's container needs."""
    placement: RolePlacement | None = None
    """Where the head's pod runs, if elsewhere than the others."""


class TrainerShape(Part):
    """The trainer pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.replicas == 0 ? self.gpusPerReplica + self.cpuRanksPerReplica == 0"
                " : (self.gpusPerReplica >= 1) != (self.cpuRanksPerReplica >= 1)",
                "replicas: 0 (the head trains, on its CPU) goes with neither gpusPerReplica nor"
                " cpuRanksPerReplica; 1 or more goes with exactly one of them",
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
                "parallelism: tensor x pipeline x expert must divide the ranks: experts are shared"
                " out between ranks that are there anyway",
            ),
            (
                "self.backend != 'torch' || self.parallelism.tensor"
                " * self.parallelism.pipeline * self.parallelism.context"
                " * self.parallelism.expert == 1",
                "parallelism: backend torch keeps a whole copy at each rank; leave it out, or set"
                " backend to megatron",
            ),
            (
                "!self.sharded || (self.backend == 'torch' && self.replicas >= 1)",
                "sharded: is for backend torch on worker pods; leave it out",
            ),
            (
                "!has(self.planning) || (self.backend == 'megatron' && self.gpusPerReplica >= 1)",
                "planning: is for backend megatron on GPUs; set gpusPerReplica, or leave it out",
            ),
            (
                "!has(self.planning) || self.parallelism.tensor * self.parallelism.pipeline"
                " * self.parallelism.context * self.parallelism.expert == 1",
                "planning: with it, the operator chooses the parallelism; leave one of both out",
            ),
            (
                "!has(self.planning) || self.dtype == 'bfloat16'",
                "planning: plans are for weights in bfloat16; leave dtype out, or planning",
            ),
            (
                "self.backend != 'megatron' || self.replicas >= 1",
                "backend: megatron trains on worker pods; replicas must be 1 or more",
            ),
            FOR_PODS,
            PLACED_PODS,
        )
    )

    backend: Literal["torch", "megatron"] = "torch"
    """The engine that trains."""
    image: Image | None = None
    """Container image of the workers; the head's unless given."""
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """Worker pods; 0 means that the head trains, on its CPU."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=MAX_GPUS)] = 0
    """GPUs of each worker pod, and its ranks: each has a GPU to itself."""
    cpu_ranks_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """Ranks of each worker pod that has no GPUs: processes that train together, on its cores."""
    resources: Resources = Resources()
    """What each worker's container needs besides GPUs."""
    placement: RolePlacement | None = None
    """Where the trainer pods run, if elsewhere than the others."""
    extended_resources: ExtendedResources = ()
    """What each worker's container asks of its node by name, such as devices of a fast network."""
    environment: Environment = ()
    """Variables of each worker's container for NCCL, gloo and what they send through."""
    parallelism: Parallelism = Parallelism()
    """How the model is split."""
    sharded: bool = False
    """Whether ranks hold the base's layers, and models that are trained whole, between them
    (FSDP2), rather than a copy each. The pod of the first needs memory for all of the base, which
    it reads for the others. For backend `torch` only."""
    planning: Planning | None = None
    """If given, the operator chooses `parallelism` for each session, and lowers `maxBatchTokens` to
    what fits. The session's status says what it chose, and why."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the frozen base weights; adapters, gradients and moments are float32 always."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 8192
    """Tokens of one micro-batch and data-parallel rank."""
    start_timeout_seconds: Seconds = 1800
    """How long the ranks in worker pods may take, from when the head asks for them, until each has
    a place and has loaded its part of the model; then the head ends, says what lacked, and is
    started again. They wait for each other as long in any operation, and no less than half an
    hour."""

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of each worker pod."""
        return self.gpus_per_replica or self.cpu_ranks_per_replica


class EnginesShape(Part):
    """What engines that run in the sampler pods, or beside trainers, are told."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.loraTargetModules) || !self.loraTargetModules.exists(m, m == 'all')",
                "loraTargetModules: names modules one by one; leave it out for all",
            ),
        )
    )

    adapters_claim_name: ObjectName | None = None
    """PersistentVolumeClaim that the head writes adapters to (whole models too, where those are
    trained), and the engines read; ReadWriteMany, unless all pods are on one node. Absent means
    that they are written to the head's own scratch space and reach engines in requests alone."""
    gpu_memory_percent: Annotated[int, Field(ge=10, le=95)] | None = None
    """Part of the memory that is free on each GPU when an engine starts, for weights and cached
    prompts; absent means what SGLang chooses."""
    max_cached_tokens: Annotated[int, Field(ge=16, le=1 << 30)] | None = None
    """Tokens of cached prompts that an engine holds at most, however much memory that leaves;
    absent means what `gpuMemoryPercent` leaves room for."""
    lora_target_modules: (
        Annotated[
            list[Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9_]+$")]],
            Field(min_length=1, max_length=32),
        ]
        | None
    ) = None
    """Modules that adapters may adapt, by SGLang's names (`--lora-target-modules`); absent means
    all. An engine whose experts may be adapted can't take weights of theirs: whole models of a
    mixture want their names left out."""
    device_class_name: ObjectName | None = None
    """DeviceClass of the trainers' GPUs, such as `gpu.nvidia.com`, for engines that are colocated:
    containers of a pod share GPUs through a claim of devices (resource.k8s.io/v1), and no other
    way."""
    start_timeout_seconds: Seconds = 1800
    """How long an engine may take to load the base model; then it is started over. Requests wait as
    long for one that is lost, if no other is left."""
    process_group: Literal["gloo", "nccl"] | None = None
    """Backend of a torch process group with each engine, over which whole models go to it first;
    absent means none. They go from the pod of the first of the trainer's ranks, or from the head,
    where that trains: with `gloo` from the CPU there, with `nccl` from the rank's GPU. Each engine
    costs that pod 0.3 GiB of memory, and 256 MiB while it is sent a model, or the size of its
    largest tensor where that is larger; with `nccl` as much on the GPU, and a CUDA context. Not for
    colocated engines."""
    shared_memory: Literal["cpu", "cuda"] | None = None
    """Memory in which colocated engines of a single trainer pod are handed whole models first;
    absent means none. `cpu`: `/dev/shm` of the pod, where `trainer.resources.sharedMemory` must
    leave room for 512 MiB, and for twice the largest tensor. `cuda`: of the first rank's GPU (CUDA
    IPC), which takes as much there, and a CUDA context."""


class ExternalServers(Part):
    """Running inference servers that someone else operates."""

    kind: Literal["sglang", "vllm"]
    """What they run."""
    urls: Annotated[
        list[Annotated[str, Field(max_length=253, pattern=r"^https?://[A-Za-z0-9.-]+(:[0-9]+)?$")]],
        Field(min_length=1, max_length=64),
    ]
    """Where they listen, `http://host:port`. Each holds the same base model."""
    model: Text | None = None
    """What vLLM calls the base model; `modelName` unless given."""
    key_secret_name: ObjectName | None = None
    """Secret whose entry `key` is the key that the servers want, if they want one."""
    adapters_claim_name: ObjectName
    """PersistentVolumeClaim that the head writes adapters to, and the servers read."""
    adapters_folder: Annotated[str, Field(max_length=512, pattern=r"^/.+$")]
    """Where the servers have that volume."""


class SamplerShape(Part):
    """The sampler pods, or what samples instead of them."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.backend == 'sglang' ? self.replicas >= 1 : self.replicas == 0",
                "replicas: the torch sampler runs inside the head (0), and external servers are not"
                " pods of a session (0); sglang needs 1 or more",
            ),
            (
                "(self.backend == 'external') == has(self.external)",
                "external: goes with backend external, which needs it",
            ),
            (
                "self.backend != 'external' || (!self.colocated && self.gpusPerReplica == 0)",
                "gpusPerReplica, colocated: external servers have GPUs that are not a session's;"
                " leave both out",
            ),
            (
                "self.sampledLogprobs == 'model' || self.backend == 'torch'",
                "sampledLogprobs: inference servers return the model's own logprobs; leave it out,"
                " or set backend torch",
            ),
            (
                "!has(self.engines) || self.backend == 'sglang'",
                "engines: is for backend sglang; leave it out",
            ),
            (
                "self.backend != 'sglang' || self.colocated"
                " == (has(self.engines) && has(self.engines.deviceClassName))",
                "engines.deviceClassName: colocated engines share GPUs through devices of a class,"
                " others have GPUs of their own; give colocated and deviceClassName, or neither",
            ),
            (
                "!self.colocated || !has(self.engines) || !has(self.engines.processGroup)",
                "engines.processGroup: is for engines with GPUs of their own; leave it out",
            ),
            (
                "self.colocated || !has(self.engines) || !has(self.engines.sharedMemory)",
                "engines.sharedMemory: is for colocated engines, in whose pod models are trained;"
                " leave it out, or set engines.processGroup",
            ),
            (
                f"self.backend != 'sglang' || (has(self.image) && self.replicas <= {MAX_ENGINES})",
                "image, replicas: engines of backend sglang need an image that holds SGLang, and"
                f" are {MAX_ENGINES} at most; set image and replicas",
            ),
            FOR_PODS,
            PLACED_PODS,
        )
    )

    backend: Literal["torch", "sglang", "external"] = "torch"
    """What samples. `torch`: the head, with the trainer's own weights. `sglang`: engines in pods of
    their own, or `colocated` in the trainer pods. `external`: running servers of someone else's."""
    sampled_logprobs: Literal["model", "tempered"] = "model"
    """Logprobs returned with drawn tokens. `model`: the model's own distribution, whatever the
    temperature. `tempered`: the distribution at the request's temperature, before top-k and top-p;
    backend `torch` only."""
    image: Image | None = None
    """Container image of the engines, which holds SGLang."""
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 0
    """Sampler pods, each a whole engine; colocated engines, which have no pods of their own."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=MAX_GPUS)] = 0
    """GPUs of each sampler pod or colocated engine, over which the engine is divided."""
    resources: Resources = Resources()
    """What each engine's container needs besides GPUs."""
    placement: RolePlacement | None = None
    """Where engines' own pods run, if elsewhere than the others. Colocated engines are where the
    trainers are."""
    extended_resources: ExtendedResources = ()
    """What each engine's container asks of its node by name."""
    environment: Environment = ()
    """Variables of each engine's container for NCCL and what it sends through."""
    colocated: bool = False
    """Whether the sampler shares the trainers' GPUs instead of having its own."""
    engines: EnginesShape | None = None
    """What engines of backend `sglang` are told; absent means `{}`: all of it as its fields say."""
    external: ExternalServers | None = None
    """The servers of backend `external`."""

    @model_validator(mode="before")
    @classmethod
    def _engines_of_sglang(cls, given: object) -> object:
        """Have engines be told something exactly if there are any."""
        if not isinstance(given, Mapping):
            return given
        told = given.get("engines")
        has_any = given.get("backend") == "sglang"
        return {**given, "engines": (told if told is not None else {}) if has_any else None}


class Idle(Part):
    """What happens to a session nobody uses."""

    timeout_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 3600
    """How long nobody may use it."""
    action: Literal["Suspend", "Delete"] = "Suspend"
    """Suspend: its state is saved, its pods go, and the next request brings it back. Delete: a
    last checkpoint is made and the session is deleted; one that was declared is Finished and
    stays."""
