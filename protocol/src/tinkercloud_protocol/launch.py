"""All that a head is told when it is born, and all that it reports.

Written by whoever starts a head (the API server's LocalProvider, the operator's pod builder), read
by the head. It travels as one JSON file; secrets by file path only.

Compatibility: `version` rises when an old reader would misread the file. Unknown keys are refused,
so that a setting which does nothing cannot pass for one that works.
"""

from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_protocol.training import OptimizerConfig


class _Config(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )


class BaseModelSource(_Config):
    """The model a head serves."""

    name: str
    """What SDK users ask for, such as `Qwen/Qwen3-8B`."""
    path: str
    """A local folder in Hugging Face layout."""


class Listen(_Config):
    """Where the head accepts connections: a socket it inherits, or an address it binds."""

    fd: int | None = None
    """Inherited listening socket; takes the place of host and port."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=65536)] = 0


class TrainerConfig(_Config):
    """How to train."""

    backend: Literal["torch", "megatron", "none"] = "torch"
    """The engine that trains. `torch`: any Hugging Face causal language model, a whole copy at each
    rank. `megatron`: models of the Llama, Mistral, Qwen, Mixtral and DeepSeek families, divided
    over ranks. `none`: the head samples only."""
    ranks: Annotated[int, Field(ge=0)] = 0
    """Processes that train together, each a Ray actor. 0: the head's own process trains, for which
    the backend must be torch."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that each weight is divided over. megatron only."""
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that the layers are divided over. megatron only."""
    context_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that each sequence is divided over. megatron only."""
    expert_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that the experts of a mixture are divided over, among those that are there anyway.
    megatron only."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the trainer computes. `cuda` with ranks: each has a GPU to itself, which Ray hands out;
    the head itself needs none then."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the frozen base weights. Adapters, gradients and moments are float32 always."""
    max_batch_tokens: Annotated[int, Field(ge=1)] = 2048
    """Tokens of one micro-batch; a single longer datum is one of its own."""
    max_kept_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens of a micro-batch whose activations are all kept for the backward pass. Larger
    ones are computed again there, layer by layer, which takes a third more time and a small part
    of the memory. None: any."""
    packed_weights: bool = True
    """Whether a CPU keeps frozen layers packed for speed as well, which triples their memory. Not
    what is sharded."""
    sharded: bool = False
    """Whether ranks hold the base's layers, and models that are trained whole, between them
    (FSDP2), rather than a copy each. The first reads all of the base, to host memory. torch
    only."""
    start_timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """How long ranks may take until each has a place, has met the others and has loaded what it
    works with; then the head ends, or, of ranks in the place of lost ones, the request fails. Ranks
    wait for each other as long in any operation, and no less than half an hour."""

    @property
    def model_ranks(self) -> int:
        """Ranks that a copy of the model is divided over, by megatron."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        divided = self.model_ranks
        if self.backend == "none" and self.ranks:
            raise ValueError(f"ranks: {self.ranks}, but backend none trains nothing; set it to 0")
        if self.backend != "megatron" and divided * self.expert_parallel > 1:
            raise ValueError(
                "tensor_parallel, pipeline_parallel, context_parallel and expert_parallel: backend"
                f" {self.backend} divides no model; set them to 1, or backend to megatron"
            )
        if self.backend == "megatron" and self.ranks == 0:
            raise ValueError("ranks: backend megatron trains at ranks; set it to 1 or more")
        if self.sharded and (self.backend != "torch" or self.ranks == 0):
            raise ValueError("sharded: only for ranks of backend torch; leave it out, or set ranks")
        if self.max_kept_tokens and (self.sharded or self.expert_parallel > 1):
            raise ValueError(
                f"max_kept_tokens: {self.max_kept_tokens}, but with sharded or expert_parallel all"
                " ranks must do the same; set it to 0, or leave it out"
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
    """Servers that sample in the head's place. None of it concerns backend torch."""

    kind: Literal["sglang", "vllm"] = "sglang"
    """What the servers run, and so what they are asked in."""
    urls: Annotated[tuple[str, ...], Field(examples=[["http://127.0.0.1:30000"]])] = ()
    """Where they listen, `http://host:port`. Each holds the same base model; a sampling session
    keeps to one of them, where its prompts are cached."""
    model: str | None = None
    """What vLLM calls the base model; absent means what SDK users call it."""
    key_file: str | None = None
    """File holding the key that the servers want, if they want one."""
    adapters_dir: str | None = None
    """Folder for adapters, which servers read that take none in requests, as vLLM. Absent means one
    in scratch_dir, which suits servers on the same machine."""
    adapters_dir_there: str | None = None
    """The same folder as the servers see it; absent means under the same path."""
    adapters_seen: bool = True
    """Whether the servers see that folder. If not, SGLang is sent everything, whatever its size."""
    max_concurrent_requests: Annotated[int, Field(ge=1)] = 256
    """Sampling requests that a server has at the same time; more wait in the head."""
    recovery_seconds: Annotated[float, Field(gt=0)] = 300.0
    """How long requests wait for a server that does not answer, when no other one does."""
    colocated: bool = False
    """Whether the servers share their GPUs with the trainer: they give their memory back while it
    computes. sglang only, started with --enable-memory-saver."""
    process_group: Literal["nccl", "gloo"] | None = None
    """Backend of a torch process group with each engine, over which whole models go to it; what
    fails goes in requests or by files. They go from where they are trained, the head or the first
    of the trainer's ranks, which must reach the engines, and be reached by them, at any port.
    `nccl`: from the GPU there, to engines with the same version of NCCL. `gloo`: from the CPU.
    Absent means no group. Backend sglang only."""
    shared_memory: Literal["cuda", "cpu"] | None = None
    """Memory in which whole models are handed to engines on the machine where they are trained, the
    head's or that of the first of the trainer's ranks, whose /dev/shm and /tmp the engines see;
    what fails goes in requests or by files. `cuda`: of the GPU that trains there (CUDA IPC). `cpu`:
    of the machine; /dev/shm must have room for 512 MiB, and for twice the largest tensor. Absent
    means none. Backend sglang only."""


class SamplerConfig(_Config):
    """How to sample."""

    backend: Literal["torch", "sglang", "external"] = "torch"
    """What samples. `torch`: the head itself. `sglang`: SGLang engines that serve this head alone.
    `external`: a running vLLM or SGLang server that someone else operates, whose base weights are
    left alone."""
    inference: InferenceConfig = InferenceConfig()
    sampled_logprobs: Literal["model", "tempered"] = "model"
    """Logprobs returned with drawn tokens. `model`: the model's own distribution, as forward
    computes it, whatever the temperature. `tempered`: the distribution at the temperature of the
    request, before top-k and top-p; backend torch only."""
    max_queued_requests: Annotated[int, Field(ge=1)] = 4096
    """Sampling requests of one owner that wait or run. Beyond this, asample is answered 429 and the
    SDK backs off."""
    max_running_sequences: Annotated[int, Field(ge=1)] = 64
    """Sequences decoded together. This and what follows concern backend torch."""
    prefill_chunk_tokens: Annotated[int, Field(ge=1)] = 512
    """Prompt tokens computed between two decoding steps of the other sequences."""
    max_cached_tokens: Annotated[int, Field(ge=1)] = 1 << 17
    """Room for keys and values of the sequences that are drawn together, in tokens, each counted as
    long as it may become. Prompts that wait for room take up to a quarter of it more, and prompts
    read lately another quarter; one request alone always has room."""

    @model_validator(mode="after")
    def _check_servers(self) -> Self:
        inference = self.inference
        if self.backend == "torch" and inference != InferenceConfig():
            raise ValueError(
                "inference: backend torch asks no server; leave it out, or set backend to sglang or"
                " external"
            )
        if self.backend != "torch" and self.sampled_logprobs != "model":
            raise ValueError(
                f"sampled_logprobs: {self.sampled_logprobs} is for backend torch; inference servers"
                " return the model's own logprobs"
            )
        if self.backend != "torch" and not inference.urls:
            raise ValueError(f"inference.urls: backend {self.backend} needs one or more of them")
        if self.backend == "sglang" and inference.kind != "sglang":
            raise ValueError("inference.kind: vllm is for backend external")
        if inference.kind == "vllm" and not inference.adapters_seen:
            raise ValueError("inference.adapters_seen: vllm reads adapters from files alone")
        if inference.colocated and self.backend != "sglang":
            raise ValueError("inference.colocated: only engines of this head can be; see backend")
        if inference.process_group and (self.backend != "sglang" or inference.colocated):
            raise ValueError(
                f"inference.process_group: {inference.process_group} is for engines of this head"
                " that have GPUs of their own; leave it out, or set backend to sglang and colocated"
                " to false"
            )
        if inference.shared_memory and (self.backend != "sglang" or inference.process_group):
            raise ValueError(
                f"inference.shared_memory: {inference.shared_memory} is for engines of this head"
                " that are in no process group; leave it out, or set backend to sglang and leave"
                " process_group out"
            )
        return self


def check_gpu_of_trainer(trainer: TrainerConfig, sampler: SamplerConfig) -> None:
    """Return unless models are to go to engines from a GPU on which nobody trains.

    Raises:
        ValueError: they are.
    """
    trains_there = trainer.device == "cuda" and trainer.backend != "none"
    inference = sampler.inference
    wants = [
        ("process_group", "nccl", "gloo", inference.process_group),
        ("shared_memory", "cuda", "cpu", inference.shared_memory),
    ]
    for setting, of_gpu, of_cpu, wanted in wants:
        if wanted == of_gpu and not trains_there:
            raise ValueError(
                f"sampler.inference.{setting}: {of_gpu} wants a trainer on a GPU, but"
                f" trainer.backend is {trainer.backend} and trainer.device {trainer.device}; set it"
                f" to {of_cpu}, or leave it out"
            )


class Limits(_Config):
    """Bounds on what a client may ask for."""

    max_lora_rank: Annotated[int, Field(ge=1)] = 256
    """Rank of an adapter."""
    max_context_length: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a sequence; absent means what the model's own configuration says
    (`max_position_embeddings`), and more than that is lowered to it."""
    max_body_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    """Of one request, before and after decompression."""
    max_queued_bytes: Annotated[int, Field(ge=1)] = 512 << 20
    """Of one owner: the training requests that wait, of all models together, and the sampling
    requests that wait or run; each as large as it came or as it is when read, if that is more.
    Beyond it a request is answered 429 and the SDK backs off."""
    max_result_bytes: Annotated[int, Field(ge=1)] = 512 << 20
    """Of all results that are kept for one owner. Beyond it those that were read are dropped first,
    then the oldest samples that nobody has read: who asks for one is answered 410, and the SDK
    draws it again. Unread results of training are never dropped for it: the owner's next
    forward_backward waits, or is answered 429, until they are retrieved."""
    max_models_per_owner: Annotated[int, Field(ge=1)] | None = None
    """Models of one owner that a head holds at the same time; absent means any number, as far as
    memory allows."""
    max_sampler_bytes: Annotated[int, Field(ge=1)] = 2 << 30
    """Of sampler weights kept in memory; beyond it the least recently used go to scratch_dir."""
    max_snapshot_bytes: Annotated[int, Field(ge=1)] = 8 << 30
    """Of all sampler weights kept, in memory and in files: adapters in float32, whole models in
    trainer.dtype. Beyond it the least recently used are let go: a checkpoint's are read again when
    needed, those saved under no name are lost. Each model's latest stay, and what is being sampled
    from."""
    max_placed_bytes: Annotated[int, Field(ge=1)] = 8 << 30
    """Of whole models that stay in the scratch_dir of the first of the trainer's ranks, from where
    they go to engines over a process group or in shared memory; beyond it they come to the head."""


class Timings(_Config):
    """Durations, in seconds."""

    long_poll_seconds: Annotated[float, Field(gt=0)] = 20.0
    """How long retrieve_future is held. The SDK gives up at 45."""
    gap_seconds: Annotated[float, Field(gt=0)] = 360.0
    """How long a missing seq_id is waited for. The SDK retries a submit for up to 300."""
    result_ttl_seconds: Annotated[float, Field(gt=0)] = 900.0
    """How long a result is kept after it was first read."""
    unread_result_ttl_seconds: Annotated[float, Field(gt=0)] = 86400.0
    """How long a result nobody asked for is kept."""
    drain_seconds: Annotated[float, Field(gt=0)] = 20.0
    """How long a stopping head may finish what it runs."""
    suspend_seconds: Annotated[float, Field(gt=0)] = 60.0
    """How long it may then take to write what it holds to the object store, so that runs go on in
    the next head. Who kills it must wait for both and some seconds more."""
    orphan_grace_seconds: Annotated[float, Field(gt=0)] | None = None
    """How long a head outlives the last API server that held its lease; absent means for ever."""

    @property
    def stop_seconds(self) -> float:
        """How long a head takes to stop, at most, before it ends what serves its connections."""
        return self.drain_seconds + self.suspend_seconds


class HeadConfig(_Config):
    """The head's whole configuration."""

    version: Literal[1] = 1
    head: str
    """The head's own name, for logs and status."""
    generation: str = ""
    """Differs between any two processes that ever served under this name. Empty: each process that
    reads this makes one for itself, as those of a pod must, which all read the same file."""
    model: BaseModelSource
    token_file: str
    """File holding the token that requests must carry."""
    checkpoint_root: str
    """URL of the object store: file:///..., s3://..., gs://..., az://..."""
    scratch_dir: str
    """Local folder for what may be lost."""
    unsaved_dir: str | None = None
    """Local folder that outlives the head, for models that the checkpoint store does not take while
    the head stops; absent means that they are lost then."""
    reason_file: str | None = None
    """File that gets one line about why the engine could not be loaded, for who starts heads to
    read; absent means that the log alone says it."""
    listen: Listen = Listen()
    trainer: TrainerConfig = TrainerConfig()
    sampler: SamplerConfig = SamplerConfig()
    limits: Limits = Limits()
    timings: Timings = Timings()

    @model_validator(mode="after")
    def _check_gpu_of_trainer(self) -> Self:
        check_gpu_of_trainer(self.trainer, self.sampler)
        return self


class ModelSpec(_Config):
    """PUT /models/<model id>: the model to create, empty or from a checkpoint."""

    owner: str
    lora: LoraConfig | None
    """None means full fine-tuning."""
    optimizer: OptimizerConfig = OptimizerConfig()
    restore_from: str | None = None
    """A `tinker://` path whose weights the model starts from."""
    restore_optimizer: bool = False
    resume_generation: str | None = None
    """Generation of the head that held the model and suspended it: the model goes on from there,
    instead of beginning."""


class SamplerSpec(_Config):
    """PUT /samplers/<sampling session id>: the weights that session samples from."""

    owner: str = ""
    """Whose limits the session's samples and results count against. Absent from an API server that
    is older than these limits."""
    model_path: str | None = None
    """A `tinker://` path; absent means the base model itself."""
    saved_at: AwareDatetime | None = None
    """`created_at` of the checkpoint that was at that path when the session was made: another one
    that was saved there since is not sampled from. Absent means that nobody has noted it."""


class HeadStatus(_Config):
    """GET /status: what the head reports of itself."""

    head: str
    generation: str
    model_name: str
    base_fingerprint: str | None = None
    """`fingerprints.BaseFingerprint` of the model that it serves; absent where nobody knows it."""
    ready: bool
    models: list[str]
    """Models it holds."""
    samplers: int
    """Sampling sessions it knows."""
    pending_requests: int
    idle_seconds: float
    """Since the last request that was not a health check or a status query."""
    suspended: bool = False
    """Whether all it holds is in the object store, so that it may be killed at any moment."""
    latest_checkpoint: str | None = None
    """`tinker://` path of the newest training checkpoint it has written."""


class Saved(_Config):
    """Answer to POST /checkpoint."""

    checkpoints: list[str]
    """`tinker://` paths, one for each model."""


class HeldModel(_Config):
    """A model of a head, and the memory it takes there."""

    model_id: str
    is_suspended: bool = False
    """Whether it is in the object store, and not in memory, until the next request for it."""
    model_bytes: int = 0
    """Of weights, gradient and moments in the head's process: none of what ranks hold."""
    sampler_bytes: int = 0
    """Of its weights that were published for sampling and saved under no name, also where they are
    in files of the scratch folder."""
    result_bytes: int = 0
    """Of its results and those of its samplers."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of all of it."""
        return self.model_bytes + self.sampler_bytes + self.result_bytes


class HeldModels(_Config):
    """Answer to GET /models."""

    models: list[HeldModel]


class ModelSuspended(_Config):
    """Answer to POST /suspend_model/<model id>."""

    is_suspended: bool
    """False if the model is in use, unknown, or can't be written now."""
