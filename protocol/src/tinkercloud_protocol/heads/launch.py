"""The configuration that a head starts with, and the status that it reports.

The launcher of a head (the API server's LocalProvider, the operator's pod builder) writes the
configuration as one JSON file, and the head reads it. Secrets are passed by file path only.

Compatibility: `version` is increased when an old reader would misread the file. Unknown keys are
rejected, so that a setting without effect is not mistaken for one that works; defaults are left
out, so that a head of the release before rejects only what it can't do. Of answers, unknown keys
are ignored. `HEAD_PROTOCOL` numbers all of this, and the requests to heads.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from tinkercloud_protocol.heads.autosave import AutosaveConfig
from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.engine_scaling_settings import EngineScaling
from tinkercloud_protocol.heads.releases import Versions, this_release
from tinkercloud_protocol.losses.loss_limits import LossLimits
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.image_limits import ImageLimits
from tinkercloud_protocol.requests.training_requests import OptimizerConfig

HEAD_PROTOCOL = Versions(1, 1)
"""Versions of the protocol between heads and what calls them that this release speaks. It is raised
when a head or an API server of the release before would misread a request or an answer."""


_COLLECTOR = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")


def check_collector(text: str) -> str:
    """Return the address of an OpenTelemetry collector (`OtlpEndpoint`).

    Raises:
        ValueError: it is none, or has a password, which would be in a ConfigMap and in logs. The
            message does not show the password.
    """
    if not _COLLECTOR.fullmatch(text):
        raise ValueError(
            f"got {text.rpartition('@')[2]!r}; expected the address of a collector that begins with"
            " http:// or https:// and has no user name and no query, such as http://collector:4318"
        )
    return text


OtlpEndpoint = Annotated[str, AfterValidator(check_collector)]
"""Address of an OpenTelemetry collector that accepts OTLP over HTTP at `/v1/traces` below it."""


class _Config(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )


class BaseModelSource(_Config):
    """The base model that a head serves."""

    name: str
    """Name that SDK users request, such as `Qwen/Qwen3-8B`."""
    path: str
    """Path of a local folder in Hugging Face layout."""


class Listen(_Config):
    """Where the head accepts connections: an inherited socket, or an address that it binds."""

    fd: int | None = None
    """File descriptor of an inherited listening socket, which overrides host and port."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=65536)] = 0


class TrainerConfig(_Config):
    """How the head trains."""

    backend: Literal["torch", "megatron", "none"] = "torch"
    """Training engine. `torch`: any Hugging Face causal language model, with a full copy on each
    rank. `megatron`: models of the Llama, Mistral, Qwen, Mixtral and DeepSeek families, split
    across ranks. `none`: the head only samples."""
    ranks: Annotated[int, Field(ge=0)] = 0
    """Number of ranks (training processes). Each rank is a Ray actor. If 0, the process of the head
    trains; this requires backend torch."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of ranks that share each weight matrix. Only for backend megatron."""
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of pipeline stages, each of which holds a range of layers. Only for backend
    megatron."""
    context_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of ranks that share each sequence. Only for backend megatron."""
    expert_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of ranks that share the experts of a mixture-of-experts model. It does not increase
    the number of ranks. Only for backend megatron."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the trainer. With `cuda` and ranks, Ray assigns one GPU to each rank, and the head
    does not need a GPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the frozen base weights. Adapters, gradients and optimizer moments are always
    float32."""
    max_batch_tokens: Annotated[int, Field(ge=1)] = 2048
    """Maximum number of tokens per micro-batch. A longer datum forms its own micro-batch."""
    max_shared_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of tokens, at each replica, of a pass that small requests of several models
    share. If 0, passes are never shared, and results are bit-identical whether or not other models
    train at the same time; otherwise they are equal up to rounding. None: `max_batch_tokens`."""
    max_kept_tokens: Annotated[int, Field(ge=0)] | None = None
    """Size, in tokens, above which a micro-batch uses activation checkpointing: activations are
    recomputed layer by layer in the backward pass, which takes a third more time and a small
    fraction of the memory. None: all activations are always kept."""
    sharded: bool = False
    """Whether to shard the base model and fully fine-tuned models across the ranks (FSDP2). If
    false, each rank holds a full copy. The first rank reads the whole base model into host memory.
    Only for backend torch."""
    start_timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Timeout, in seconds, for all ranks to be scheduled, join the process group and load their
    part of the model. When it expires, the head exits; if the ranks replace lost ranks, the request
    fails instead. Collective operations use the same timeout, but at least 30 minutes."""

    @property
    def model_ranks(self) -> int:
        """Number of ranks that one copy of the model is divided over (backend megatron)."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        divided = self.model_ranks
        if self.backend == "none" and self.ranks:
            raise ValueError(
                f"ranks: {self.ranks}, but backend none does not train; set ranks to 0"
            )
        if self.backend != "megatron" and divided * self.expert_parallel > 1:
            raise ValueError(
                "tensor_parallel, pipeline_parallel, context_parallel and expert_parallel: not"
                f" supported by backend {self.backend}; set them to 1, or backend to megatron"
            )
        if self.backend == "megatron" and self.ranks == 0:
            raise ValueError(
                "ranks: 0, but backend megatron requires ranks; set ranks to 1 or more"
            )
        if self.sharded and (self.backend != "torch" or self.ranks == 0):
            raise ValueError(
                "sharded: only valid for backend torch with ranks; remove it, or set both"
            )
        if self.max_kept_tokens and (self.sharded or self.expert_parallel > 1):
            raise ValueError(
                f"max_kept_tokens: {self.max_kept_tokens}, but sharded and expert_parallel require"
                f" all"
                " ranks to keep the same activations; set it to 0, or remove it"
            )
        if self.ranks % divided:
            raise ValueError(
                f"ranks: {self.ranks} is not a multiple of tensor_parallel x pipeline_parallel x"
                f" context_parallel, {divided}"
            )
        shared = self.tensor_parallel * self.pipeline_parallel * self.expert_parallel
        if self.ranks % shared:
            raise ValueError(
                f"ranks: {self.ranks} is not a multiple of tensor_parallel x pipeline_parallel x"
                f" expert_parallel, {shared}"
            )
        return self


class InferenceConfig(_Config):
    """Inference servers that sample instead of the head. Not used by backend torch."""

    kind: Literal["sglang", "vllm"] = "sglang"
    """Type of the servers. It determines the API that the head uses."""
    urls: Annotated[tuple[str, ...], Field(examples=[["http://127.0.0.1:30000"]])] = ()
    """URLs of the servers, such as `http://host:port`. All servers must serve the same base model.
    All requests of a sampling session go to the same server, which caches its prompts."""
    model: str | None = None
    """Name of the base model in vLLM. Defaults to the name that SDK users request."""
    key_file: str | None = None
    """File that contains the API key of the servers, if they require one."""
    adapters_dir: str | None = None
    """Folder to which the head writes adapters, for servers such as vLLM that do not accept
    adapters in requests. Defaults to a folder in scratch_dir, which only works for servers on the
    same machine."""
    adapters_dir_there: str | None = None
    """Path at which the servers see `adapters_dir`. Defaults to the same path."""
    adapters_seen: bool = True
    """Whether the servers can read `adapters_dir`. If false, the head sends all weights to SGLang
    in requests, regardless of their size."""
    max_concurrent_requests: Annotated[int, Field(ge=1)] = 256
    """Maximum number of concurrent sampling requests per server. Further requests wait in the
    head."""
    recovery_seconds: Annotated[float, Field(gt=0)] = 300.0
    """How long, in seconds, requests wait for a server to recover if none of the servers
    responds."""
    scaling: EngineScaling | None = None
    """How the number of servers follows the load: the first of `urls` exist. If unset, all of them
    exist. Only for SGLang servers that are not colocated."""
    colocated: bool = False
    """Whether the servers share GPUs with the trainer and release GPU memory while it computes.
    Only for SGLang servers started with --enable-memory-saver."""
    process_group: Literal["nccl", "gloo"] | None = None
    """Backend of the torch process group that sends fully fine-tuned models to each engine. If
    unset, or if a transfer fails, requests and files are used. The sender is the trainer's first
    rank, or the head if the head trains. The sender and the engines must be able to connect to each
    other on any port. `nccl` sends from the GPU and requires the same NCCL version in the engines;
    `gloo` sends from the CPU. Only for backend sglang."""


class SamplerConfig(_Config):
    """How the head samples."""

    backend: Literal["torch", "sglang", "external"] = "torch"
    """Sampling engine. `torch`: the head itself. `sglang`: SGLang engines that serve only this
    head. `external`: existing vLLM or SGLang servers that are managed outside Tinkercloud; their
    base weights are not changed."""
    inference: InferenceConfig = InferenceConfig()
    sampled_logprobs: Literal["model", "tempered"] = "model"
    """Type of logprobs returned with sampled tokens. `model`: logprobs under the model's own
    distribution, as forward computes it, at any temperature. `tempered`: logprobs under the
    distribution at the request's temperature, before top-k and top-p; only for backend torch."""
    max_queued_requests: Annotated[int, Field(ge=1)] = 4096
    """Maximum number of waiting and running sampling requests per owner. Further asample requests
    receive status 429, and the SDK backs off."""
    max_running_sequences: Annotated[int, Field(ge=1)] = 64
    """Maximum number of sequences that are decoded together; an owner without any may add one. Only
    for backend torch."""
    prefill_chunk_tokens: Annotated[int, Field(ge=1)] = 512
    """Number of prompt tokens to process between two decoding steps of other sequences. Only for
    backend torch."""
    max_cached_tokens: Annotated[int, Field(ge=1)] = 1 << 17
    """Capacity, in tokens, of the key-value cache of sequences that are decoded together. Each
    sequence counts with its maximum length. Waiting prompts may use another quarter of this
    capacity, and recently used prompts a further quarter. A single request always fits. Only for
    backend torch."""

    @model_validator(mode="after")
    def _check_servers(self) -> Self:
        inference = self.inference
        if self.backend == "torch" and inference != InferenceConfig():
            raise ValueError(
                "inference: backend torch uses no servers; remove it, or set backend to sglang or"
                " external"
            )
        if self.backend != "torch" and self.sampled_logprobs != "model":
            raise ValueError(
                f"sampled_logprobs: {self.sampled_logprobs} is only valid for backend torch;"
                f" inference"
                " servers only return the model's own logprobs"
            )
        if self.backend != "torch" and not inference.urls:
            raise ValueError(f"inference.urls: backend {self.backend} requires one or more URLs")
        if self.backend == "sglang" and inference.kind != "sglang":
            raise ValueError("inference.kind: vllm is only valid for backend external")
        if inference.kind == "vllm" and not inference.adapters_seen:
            raise ValueError(
                "inference.adapters_seen: must be true for vllm, which only reads adapters from"
                " files"
            )
        if inference.colocated and self.backend != "sglang":
            raise ValueError("inference.colocated: only valid for backend sglang")
        if inference.process_group and (self.backend != "sglang" or inference.colocated):
            raise ValueError(
                f"inference.process_group: {inference.process_group} is only valid for engines of"
                " backend sglang that are not colocated; remove it, or set backend to sglang and"
                " colocated to false"
            )
        return self

    @model_validator(mode="after")
    def _check_scaling(self) -> Self:
        scaling, inference = self.inference.scaling, self.inference
        if scaling is None:
            return self
        if self.backend != "sglang" or inference.colocated:
            raise ValueError(
                "inference.scaling: only valid for engines of backend sglang that are not"
                " colocated; remove it"
            )
        if scaling.min_engines > len(inference.urls):
            raise ValueError(
                f"inference.scaling.min_engines: {scaling.min_engines} exceeds the number of urls,"
                f" {len(inference.urls)}"
            )
        return self


def check_gpu_of_trainer(trainer: TrainerConfig, sampler: SamplerConfig) -> None:
    """Check that transfers from a trainer's GPU are only configured for a trainer on a GPU.

    Raises:
        ValueError: A transfer from a GPU is configured, but the trainer does not use one.
    """
    trains_there = trainer.device == "cuda" and trainer.backend != "none"
    if sampler.inference.process_group == "nccl" and not trains_there:
        raise ValueError(
            "sampler.inference.process_group: nccl requires a trainer on a GPU, but"
            f" trainer.backend is {trainer.backend} and trainer.device is {trainer.device}; set it"
            " to gloo, or remove it"
        )


class Limits(ImageLimits, LossLimits, _Config):
    """Upper bounds on what a client may request."""

    max_lora_rank: Annotated[int, Field(ge=1)] = 256
    """Maximum rank of an adapter."""
    max_context_length: Annotated[int, Field(ge=1)] | None = None
    """Maximum length of a sequence, in tokens. Defaults to the model's own limit, which is also
    the upper bound: `max_position_embeddings`, extended by the factor of `rope_scaling`."""
    max_body_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    """Maximum size of a request body in bytes, before and after decompression."""
    max_queued_bytes: Annotated[int, Field(ge=1)] = 512 << 20
    """Maximum total size of an owner's queued requests in bytes: waiting training requests of all
    models, and waiting or running sampling requests. Each request counts with its encoded or
    decoded size, whichever is larger. Further requests receive status 429, and the SDK backs
    off. An API server has the same limit for an owner's requests to heads that are not ready."""
    max_result_bytes: Annotated[int, Field(ge=1)] = 512 << 20
    """Maximum total size of an owner's results in bytes. When it is exceeded, results that were
    read are deleted first, then the oldest unread samples. A request for a deleted sample receives
    status 410, and the SDK samples again. Unread training results are never deleted; instead, the
    owner's next forward_backward request waits, or receives status 429, until they are
    retrieved."""
    max_models_per_owner: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of models of one owner that a head holds at the same time. If unset, only
    memory limits the number."""
    owner_weights: dict[str, Annotated[int, Field(ge=1, le=1000)]] = {}
    """Share of each owner in the computation that waits, relative to the others; 1 for owners that
    are not named. An owner with weight 2 gets twice the tokens of one with weight 1, while both
    have work. Applies to training, and to sampling by backend torch."""
    max_sampler_bytes: Annotated[int, Field(ge=1)] = 2 << 30
    """Maximum total size of sampler weights in memory, in bytes. When it is exceeded, the least
    recently used weights are moved to scratch_dir."""
    max_snapshot_bytes: Annotated[int, Field(ge=1)] = 8 << 30
    """Maximum total size of sampler weights in memory and in files, in bytes: adapters in float32,
    fully fine-tuned models in trainer.dtype. When it is exceeded, the least recently used weights
    are evicted. Weights of checkpoints are reloaded when needed, and unnamed ones if they are
    stored. The latest weights of each model, and those in use, are never evicted."""
    max_stored_snapshot_bytes: Annotated[int, Field(ge=0)] = 32 << 30
    """Maximum total bytes of evicted adapters without a name in the checkpoint store. Beyond it,
    the owner who uses the most space loses the earliest ones; whole models are always lost."""
    max_placed_bytes: Annotated[int, Field(ge=1)] = 8 << 30
    """Maximum total size, in bytes, of fully fine-tuned models in the scratch_dir of the trainer's
    first rank, which sends them to engines over a process group. Further models are stored on the
    head."""
    max_paged_bytes: Annotated[int, Field(ge=1)] = 8 << 30
    """Maximum total size, in bytes, of idle models in scratch_dir, where trainers on CPUs move them
    if others need their memory; ranks on a machine divide it. Without space, models are refused."""


class Timings(_Config):
    """Durations in seconds."""

    long_poll_seconds: Annotated[float, Field(gt=0)] = 20.0
    """How long, in seconds, a retrieve_future request waits for a result, and a submission for its
    head. The SDK times out after 45 seconds."""
    gap_seconds: Annotated[float, Field(gt=0)] = 360.0
    """How long, in seconds, the head waits for a missing seq_id. The SDK retries a request for up
    to 300 seconds."""
    result_ttl_seconds: Annotated[float, Field(gt=0)] = 900.0
    """How long, in seconds, a result is kept after it is first read."""
    unread_result_ttl_seconds: Annotated[float, Field(gt=0)] = 86400.0
    """How long, in seconds, an unread result is kept."""
    drain_seconds: Annotated[float, Field(gt=0)] = 20.0
    """How long, in seconds, a stopping head may take to finish running requests."""
    suspend_seconds: Annotated[float, Field(gt=0)] = 60.0
    """How long, in seconds, a stopping head may then take to write its state to the checkpoint
    store, so that the next head can resume its runs. The termination grace period must exceed
    `drain_seconds` plus `suspend_seconds` by a few seconds."""
    orphan_grace_seconds: Annotated[float, Field(gt=0)] | None = None
    """How long, in seconds, a head keeps running without an API server that holds its lease. If
    unset, the head runs until it is stopped."""

    @property
    def stop_seconds(self) -> float:
        """Maximum time, in seconds, that a head takes to stop before it closes its connections."""
        return self.drain_seconds + self.suspend_seconds


class HeadConfig(_Config):
    """The complete configuration of a head."""

    version: Literal[1] = 1
    head: str
    """Name of the head, for logs and status."""
    generation: str = ""
    """Identifies the process among all processes that ever served under this name. If empty, each
    process generates its own, as required in pods, where every process reads the same file."""
    model: BaseModelSource
    token_file: str
    """File that contains the token that requests must carry."""
    checkpoint_root: str
    """URL of the object store: file:///..., s3://..., gs://..., az://..."""
    scratch_dir: str
    """Local folder for data that may be lost."""
    unsaved_dir: str | None = None
    """Local folder that outlives the head, for models that cannot be written to the checkpoint
    store while the head stops. If absent, such models are lost."""
    reason_file: str | None = None
    """File to which the head writes one line if the engine cannot be loaded, for the launcher to
    read. If absent, the reason is only logged."""
    journal_dir: str | None = None
    """Local folder that outlives the head, for the journals and snapshots of its models. If absent,
    models have no journals."""
    listen: Listen = Listen()
    trainer: TrainerConfig = TrainerConfig()
    sampler: SamplerConfig = SamplerConfig()
    limits: Limits = Limits()
    timings: Timings = Timings()
    autosave: AutosaveConfig = AutosaveConfig()
    durability: DurabilityConfig = DurabilityConfig()
    otlp_endpoint: OtlpEndpoint | None = None
    """Address of an OpenTelemetry collector, to which the head sends spans of requests (OTLP over
    HTTP). If absent, it sends none."""

    @model_validator(mode="after")
    def _check_gpu_of_trainer(self) -> Self:
        check_gpu_of_trainer(self.trainer, self.sampler)
        return self


class ModelSpec(_Config):
    """PUT /models/<model id>: the model to create, new or from a checkpoint."""

    owner: str
    lora: LoraConfig | None
    """The adapter; None means full fine-tuning."""
    optimizer: OptimizerConfig = OptimizerConfig()
    restore_from: str | None = None
    """`tinker://` path of the checkpoint to restore weights from."""
    restore_optimizer: bool = False
    resume_generation: str | None = None
    """Generation of the head that suspended the model. If set, the model resumes from that
    state."""


class SamplerSpec(_Config):
    """PUT /samplers/<sampling session id>: the weights that the session samples from."""

    owner: str
    """Owner whose limits the session's samples and results count towards."""
    model_path: str | None = None
    """`tinker://` path of the weights. If absent, the session samples from the base model."""
    saved_at: AwareDatetime | None = None
    """`created_at` of the checkpoint at that path when the session was created. A checkpoint that
    was saved there later is not used. Absent if the base model is sampled."""


class _Answer(_Config, extra="ignore"):
    """An answer of a head, which may be of a later release and say more."""


class HeadStatus(_Answer):
    """GET /status: the state of the head."""

    head: str
    generation: str
    release: str = "before 0.1.0"
    """The release of the head."""
    protocol: Versions = Versions(0, 0)
    """The versions of `HEAD_PROTOCOL` that it speaks."""
    model_name: str
    base_fingerprint: str | None = None
    """`fingerprints.BaseFingerprint` of the served model. Absent if it is unknown."""
    ready: bool
    models: list[str]
    """Ids of the models that the head holds."""
    samplers: int
    """Number of sampling sessions."""
    pending_requests: int
    idle_seconds: float
    """Time in seconds since the last request other than health checks and status queries."""
    suspended: bool = False
    """Whether all state is in the object store, so that the head can be killed at any time."""
    latest_checkpoint: str | None = None
    """`tinker://` path of the newest training checkpoint that the head has written."""
    capacity: HeadCapacity | None = None
    durability: Literal["none", "local", "remote", "degraded"] = "none"
    """What survives if the head is killed (`DurabilityConfig.level`). `degraded`: some models would
    not survive, although they should, because the disk fails."""


class Saved(_Answer):
    """Response to POST /checkpoint."""

    checkpoints: list[str]
    """`tinker://` paths, one per model."""


RunQueueState = Literal["idle", "running", "waiting", "paused_rate_limit"]


class HeldModel(_Answer):
    """A model of a head, and its memory usage."""

    model_id: str
    is_suspended: bool = False
    """Whether the model is in the object store, and not in memory, until it is requested again."""
    model_bytes: int = 0
    """Size of weights, gradient and moments in memory, at the rank that takes most of it."""
    sampler_bytes: int = 0
    """Size of the model's unnamed versions, in memory and in scratch_dir."""
    result_bytes: int = 0
    """Size of the results of the model and its samplers."""
    step: int | None = None
    """Number of optimizer steps that the model has taken; None if the head does not know it."""
    is_repeating: bool = False
    """Whether it repeats requests that another head had accepted, so that `step` is behind."""
    queue_state: RunQueueState = "idle"
    """What its next request waits for. `waiting`: for earlier ones, or for its turn."""
    queue_reason: str | None = None
    """Why the next request waits; None if none does, or no reason is known."""
    waiting_seconds: float = 0.0
    """For how long there have been requests, of which none has finished; 0 without any."""
    tokens_per_minute: float = 0.0
    """Trained, forwarded, prefilled and sampled tokens of the last minute."""
    unsaved_steps: int = 0
    """Number of changes, mostly optimizer steps, that are in no checkpoint."""
    autosave_failure: str | None = None
    """Why the last automatic save failed; None if it succeeded."""
    is_durable: bool = False
    """Whether the model would survive the end of its head's process."""
    degraded: str | None = None
    """Why it would not, although it should; None otherwise."""

    @property
    def memory_bytes(self) -> int:
        """Sum of all sizes."""
        return self.model_bytes + self.sampler_bytes + self.result_bytes


class HeldModels(_Answer):
    """Response to GET /models."""

    models: list[HeldModel]
    free_bytes: int | None = None
    """Free memory of the trainer's device for more models (`HeadCapacity`); None if unknown."""


def protocol_refusal(status: HeadStatus, ours: Versions = HEAD_PROTOCOL) -> str | None:
    """Return why this release and a head can't talk to each other; None if they can.

    They use the newest version that both speak.

    Args:
        status: what the head says.
        ours: the versions that this release speaks.
    """
    theirs = status.protocol
    if theirs.oldest <= ours.newest and ours.oldest <= theirs.newest:
        return None
    return (
        f"session head {status.head!r} is of release {status.release} and speaks {theirs} of the"
        f" head protocol, but this API server is of release {this_release()} and speaks {ours}"
    )
