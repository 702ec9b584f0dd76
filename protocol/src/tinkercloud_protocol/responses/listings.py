"""Responses of the JSON endpoints: sessions, models, runs, checkpoints, capabilities.

Field names are the SDK's (`tinker.types`). The SDK requires the mandatory fields and ignores
unknown ones.
"""

from datetime import date, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tinkercloud_protocol.requests.training_requests import OptimizerConfig


class Answer(BaseModel):
    """A JSON response."""

    model_config = ConfigDict(frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class ClientConfig(Answer):
    """Flags that the SDK reads when a client is created. Absent flags have the SDK's defaults."""

    parallel_fwdbwd_chunks: bool = True
    proto_write_fwdbwd: bool = True
    """Training batches in protobuf rather than JSON, of which SDKs from 0.22 to 0.24 know both."""
    fwd_via_fwdbwd: bool = True
    """Forward passes as requests to forward_backward, so that they are protobuf too."""
    create_model_via_load_weights: bool = True
    """One request to create a model from a checkpoint, rather than three; SDKs from 0.24 to 0.25
    know both ways."""
    proto_compress_fwdbwd: bool = False
    """zstd compression of uploads, which pays over a network but not on loopback."""
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    pjwt_auth_enabled: bool = False
    """Access tokens (auth/token) instead of keys in all requests but the first."""
    custom_loss_server_side: bool = True
    """Uploaded losses run on the server, in one pass instead of two."""
    sample_join_sampling_session: bool = True
    """Clients of one sampling session get numbers from the server, so that they never collide."""


class DynamicConfig(Answer):
    """Flags that the SDK reads again every `refresh_interval_sec` seconds."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True


class JoinSamplingSessionAnswer(Answer):
    """A client's number within its sampling session."""

    client_counter: int


class SupportedModel(Answer):
    """A model that this server offers."""

    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True
    reads_images: bool = False
    """Whether prompts may contain images. The SDK does not know this field, nor the next one."""
    state: str | None = None
    """`ready`; `loading`, with how far it is; or `failed`, with the reason. None on Kubernetes,
    where each run has a session head of its own."""


class PoolClusterUse(Answer):
    """A cluster of a pool, and what uses it (Kubernetes)."""

    name: str
    """Its TrainingSession."""
    state: str
    """Reason of its Ready condition: `Ready` if it serves requests. `Pending` before it has one."""
    slots: int
    """Number of runs that it can serve: those of the pool, or fewer if its memory has fewer."""
    models: int
    """Number of runs that have a slot on it."""
    gpus: int
    """Number of GPUs that its pods request."""
    idle_since: datetime | None = None
    """Since when its GPUs are idle; None if they are not."""
    idle_gpu_hours: float = 0.0
    """Hours of its GPUs since then, summed over GPUs."""
    memory_bytes: int | None = None
    """Memory of its models with their samplers and results; None if its head has not said it to
    this server."""
    free_bytes: int | None = None
    """Memory of the trainer's device that is free for more models, with several ranks of the one
    with the least room; None if it is not known or not limited."""


class PoolUse(Answer):
    """The clusters that the runs of a base model share, and what uses them (Kubernetes)."""

    clusters: int
    """Number of clusters, including those that are starting or stopping."""
    ready: int
    """Number of clusters that serve requests."""
    slots: int
    """Number of runs that all clusters together can serve."""
    models: int
    """Number of runs that have a slot."""
    waiting: int
    """Number of runs that wait for a slot."""
    memory_bytes: int | None = None
    """Memory of the models of all clusters, as far as their heads have said it to this server; None
    if none has."""
    free_bytes: int | None = None
    """The same for the memory that is free for more models."""
    by_cluster: list[PoolClusterUse] = []
    """Each of the clusters, by name."""


class GpuUse(Answer):
    """The GPUs that the pods of a base model hold for all owners (Kubernetes)."""

    gpus: int
    """Number of GPUs that they request."""
    idle_gpus: int
    """Number of idle GPUs: their pods are ready, and no request has used them for five minutes."""
    idle_gpu_hours: float
    """Hours that GPUs have been idle since the BaseModel was created, summed over GPUs."""
    idle_gpu_hours_by_month: dict[str, float]
    """The same by month (UTC), such as `2026-11`: this month, last month, and up to 11 before."""


class ListedModel(Answer):
    """A base model, in GET base_models (no SDK call)."""

    model_name: str
    aliases: list[str] = []
    """Its other names."""
    max_context_length: int | None
    """None before the model is on the machine."""
    trainable: bool = True
    sampleable: bool = True
    reads_images: bool = False
    state: str | None
    """As in `SupportedModel`; also `downloading`, with how far it is."""
    source: str | None
    """The folder or model id that it is served from, for admins; None on Kubernetes."""
    runs: int
    """Number of its runs that the caller sees, with those that are suspended."""
    pool: PoolUse | None = None
    """What all owners use of its pool; None if its runs share none."""
    gpus: GpuUse | None = None
    """The GPUs that it holds; None on one machine."""


class BaseModelList(Answer):
    """GET base_models (no SDK call)."""

    base_models: list[ListedModel]


class ModelRemoved(Answer):
    """DELETE base_models/{name} (no SDK call)."""

    was_served: bool
    """Whether the server served the model, or was downloading it, or had failed to serve it."""
    returns_at_start: bool
    """Whether a setting of the server names the model, so that its next start serves it again."""


class ServerCapabilities(Answer):
    """GET get_server_capabilities."""

    supported_models: list[SupportedModel]
    max_batch_size: int
    """Datums that one request may have. The SDK does not know this field, nor the next one."""
    features: list[str]
    """What the server offers, in words: `lora`, `full_fine_tuning`, `sampling` and so on."""


class ServerHealth(Answer):
    """GET health under /api/v1 (no SDK call)."""

    status: Literal["healthy", "degraded"] = "healthy"
    """`degraded`: the checkpoint store, automatic saves or the durability of a run fails."""
    version: str
    ray_status: Literal["not used", "per session"]
    """`per session`: each session on Kubernetes has a Ray cluster of its own. The server itself
    uses none."""
    active_models: int
    """Models of the caller (of everybody, for an administrator) that are in memory."""
    active_sessions: int
    """The same for sessions with a heartbeat or a request in the last two minutes."""
    failing_autosaves: int = 0
    """The same for models whose last automatic save failed (provider local)."""
    durability: Literal["none", "local", "remote", "degraded"] = "none"
    """What survives if a session head is killed (provider local). `degraded`: some of these models
    would not survive, although they should."""
    checkpoint_store_failure: str | None = None
    """Why the checkpoint store can't be used; None if it can. Models in memory still train."""


class CreateSessionAnswer(Answer):
    """POST create_session. The SDK logs each message at the level in its name."""

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class SessionInfo(Answer):
    """GET sessions/{id}."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class SessionList(Answer):
    """GET sessions."""

    sessions: list[str]


class SessionSummary(Answer):
    """One session of POST sessions/search."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    """Empty without a project."""
    status: dict[str, Any] | None
    """By `type`: active, cancelled (by the server) or client_finished; None if silent."""
    checkpoints_count: int
    checkpoint_storage_bytes: int
    display_name: str | None
    user_metadata: dict[str, str] | None


class SessionCursor(Answer):
    """Where the next page of POST sessions/search starts."""

    last_created_at: datetime
    last_session_id: str


class SessionSummaryList(Answer):
    """POST sessions/search."""

    sessions: list[SessionSummary]
    next_cursor: SessionCursor | None = None


SessionStatus = Literal["live", "silent", "ended", "failed", "waiting"]
"""What sessions are searched by. `failed`: its client has said so, or was silent for too long;
`waiting`: one of its runs, or of their next requests, waits. For the others, see `SessionUsage`."""


class ModelUsage(Answer):
    """A training run of a session, and the memory that its model uses."""

    model_id: str
    base_model: str
    state: Literal["in memory", "suspended", "deleted", "unknown"]
    """`suspended`: in the store, or a journal on disk, until it is requested again. `unknown`: not
    held by any head that this server shares among runs; it is in a Kubernetes session, or was lost
    with its head."""
    memory_bytes: int | None
    """None if unknown."""
    step: int | None = None
    """Number of optimizer steps taken; None if unknown."""
    tokens_per_minute: float = 0.0
    """Trained and sampled tokens of the last minute."""
    run_state: str = "ended"
    """Where its model is, and whether it is lost, as `RunInfo.state`."""
    reason: str | None = None
    """Why it is in this state; None if the state says enough."""
    queue_state: str = "idle"
    """What its next request waits for: idle, running, waiting, paused_rate_limit or
    paused_capacity."""
    queue_reason: str | None = None
    """Why it waits."""
    remedy: str | None = None
    """What to do if its model is lost or its request waits for a limit; None otherwise."""
    unsaved_steps: int = 0
    """Number of changes, mostly optimizer steps, that are in no checkpoint."""
    autosave_failure: str | None = None
    """Why the last automatic save failed; None if it succeeded."""
    is_durable: bool = False
    """Whether the model would survive if its head was killed."""
    degraded: str | None = None
    """Why it would not, although it should; None otherwise."""


class SessionUsage(Answer):
    """GET session_usage/{id} (no SDK call)."""

    session_id: str
    owner: str
    project_id: str | None = None
    """The project that the session belongs to."""
    name: str | None = None
    """Its display name."""
    created_at: datetime
    state: Literal["live", "silent", "ended"]
    """`silent`: not ended, but without a heartbeat for two minutes."""
    finish_reason: str | None = None
    """Why it has ended: `success`, `errored` or `interrupted`, as its client said, or `expired`;
    None before."""
    finish_detail: str | None = None
    """What was said about that."""
    last_heartbeat_at: datetime
    """As stored in the catalog, which is updated every 30 seconds."""
    last_seen_at: datetime
    """Time of the client's last sign of life: a heartbeat or a request of a run."""
    models: list[ModelUsage]
    """Its runs; a list of sessions has the ten that were used last of each."""
    num_models: int = 0
    """How many runs it has in all."""
    memory_bytes: int | None
    """Sum over `models`; None if unknown."""


class SessionUsageList(Answer):
    """GET session_usage (no SDK call)."""

    sessions: list[SessionUsage]
    total_count: int


class OwnerUsage(Answer):
    """What an owner has used of a base model in a period, or of one of its models."""

    owner: str
    base_model: str
    model_id: str | None = None
    """The trained or sampled model, or the run of the sampled checkpoint, if usage is listed by
    model. Null: requests to the base model itself."""
    project_id: str | None = None
    """The project, if usage is listed by project. Null: sessions without one."""
    key_id: int | None = None
    """The key that created the sessions, if usage is listed by key. Null: sessions whose key is not
    known."""
    key_name: str | None = None
    """The name of that key."""
    starts_at: datetime
    """Start of the hour or day; else of the first hour with usage."""
    ends_at: datetime
    """End of the hour or day; else of the last hour with usage."""
    trained_tokens: int
    """Tokens of forward_backward requests."""
    forward_tokens: int
    """Tokens of forward-only requests."""
    prefill_tokens: int
    """Tokens of prompts that were computed. A prompt counts once for all of its samples."""
    cached_tokens: int
    """Tokens of prompts that were found in a cache."""
    sampled_tokens: int
    engine_seconds: float
    """Seconds in which the session head has computed, without those of inference servers."""


class OwnerStorage(Answer):
    """What an owner's checkpoints occupy now."""

    owner: str
    checkpoints: int
    size_bytes: int


class QuotaLimit(Answer):
    """One limit of a tenant."""

    name: str
    """As in the specification of a Tenant, such as `dedicatedGpus`."""
    limit: int | None
    """None means no limit."""
    used: int | None
    """What all owners of the tenant use; None if only session heads know."""


class Quota(Answer):
    """The limits of an owner's tenant."""

    tenant: str
    waiting: int
    """Number of sessions that wait because of a limit."""
    limits: list[QuotaLimit]


class UsageList(Answer):
    """GET usage (no SDK call)."""

    usage: list[OwnerUsage]
    storage: list[OwnerStorage]
    quota: Quota | None = None
    """Limits of the tenant of the owner whose usage this is; None if it has none, or for all
    owners."""


class BilledUsage(Answer):
    """What an owner has used of a base model in a month: by project, with a key, or on a day."""

    owner: str
    project_id: str | None
    """By project; null for none."""
    key_id: int | None = None
    """By key; null for storage, and for sessions whose key is not known."""
    key_name: str | None = None
    day: date | None = None
    """By day: the day (UTC)."""
    base_model: str
    train_tokens: int
    """Tokens of forward_backward and of forward-only requests."""
    prefill_tokens: int
    cached_tokens: int
    sampled_tokens: int
    engine_seconds: float
    """Seconds in which session heads computed; they have no price."""
    storage_gib_months: float
    """GiB of checkpoints, measured once a day; those kept for half of the month count half."""
    cost: float | None
    """In the currency of the list; null if the base model has no price."""


class MonthUsage(Answer):
    """GET usage/month (no SDK call)."""

    month: str
    currency: str
    usage: list[BilledUsage]
    total: float
    """The sum of all known costs."""


class ModelData(Answer):
    """What a model consists of."""

    arch: str | None = None
    model_name: str
    tokenizer_id: str | None = None


class ModelInfo(Answer):
    """POST get_info."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    model_name: str
    is_lora: bool
    lora_rank: int | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class SamplingSessionAnswer(Answer):
    """POST create_sampling_session."""

    sampling_session_id: str


class SamplingClientAnswer(Answer):
    """POST create_sampling_client (no SDK call): the same id under two names."""

    sampling_client_id: str
    sampling_session_id: str


class SamplerInfo(Answer):
    """GET samplers/{id}."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class WeightsInfo(Answer):
    """POST weights_info."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class CopyWeightsAnswer(Answer):
    """POST copy_weights."""

    tinker_path: str


class UploadStarted(Answer):
    """POST checkpoints/uploads (no SDK call)."""

    upload_id: str
    urls: dict[str, str]
    """Where to PUT each file, by its name: paths of this server."""
    expires: datetime
    """When the upload is abandoned."""


class UnfinishedUpload(Answer):
    """An entry of GET checkpoints/uploads (no SDK call)."""

    upload_id: str
    base_model: str
    name: str
    """Name of the checkpoint that it is to become."""
    size_bytes: int
    """Declared size of its file; 0 if it is not known yet."""
    is_received: bool
    """Whether the file was received."""
    expires: datetime
    """When it is abandoned."""


class UnfinishedUploads(Answer):
    """GET checkpoints/uploads (no SDK call)."""

    uploads: list[UnfinishedUpload]


class UploadTarget(Answer):
    """Where to PUT a file of an upload."""

    url: str
    headers: dict[str, str] = {}
    """Headers to send."""


class ExternalUploadStarted(Answer):
    """POST external_weights_upload_start."""

    upload_id: str
    urls: dict[str, str | UploadTarget]
    """Where to PUT each file, by its name: a URL for SDK 0.39, and later with its headers."""
    expires: datetime


class UploadFinished(Answer):
    """POST external_weights_upload_finish, and checkpoints/uploads/{id}/finish (no SDK call)."""

    tinker_path: str


class FutureState(Answer):
    """GET and POST retrieve_future/{request_id} (no SDK calls)."""

    status: Literal["pending", "completed", "failed"]
    result: dict[str, Any] | None = None
    error: str | None = None
    category: Literal["user", "server", "unknown"] | None = None
    """Who caused the failure; absent without one."""
    reason: str | None = None
    """Why the request is still pending, if that is known."""


class CleanupAnswer(Answer):
    """POST cleanup_futures (no SDK call)."""

    cleaned_count: int


class Cursor(Answer):
    """Position of a page in its list."""

    offset: int
    limit: int
    total_count: int


class CheckpointInfo(Answer):
    """One checkpoint in a list."""

    checkpoint_id: str
    checkpoint_type: str
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    base_model: str | None = None
    """None for checkpoints that can't be read. SDKs before 0.39 ignore it."""
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    damage: str | None = None
    """Why the checkpoint cannot be read, if so. The SDK does not know this field."""


class CheckpointList(Answer):
    """GET checkpoints, and GET training_runs/{id}/checkpoints (which is not paginated)."""

    checkpoints: list[CheckpointInfo]
    cursor: Cursor | None = None


class SparedCheckpoint(Answer):
    """A checkpoint that stays, although it is not among the newest ones."""

    tinker_path: str
    reason: str


class SurplusCheckpoints(Answer):
    """GET and DELETE runs/{id}/surplus_checkpoints."""

    checkpoints: list[CheckpointInfo]
    """Those that are not among the newest ones of their kind, oldest first: they go, or are gone.
    """
    spared: list[SparedCheckpoint]
    """The others that are not among the newest ones, oldest first."""
    until: datetime | None
    """When the newest checkpoint was saved that was counted; None without any."""


class CheckpointSearchPosition(Answer):
    """Where the next page of a search starts."""

    last_created_at: datetime
    last_checkpoint_uuid: str
    """`tinker://` path of the checkpoint; opaque to the client."""


class CheckpointSearchAnswer(Answer):
    """POST checkpoints/search."""

    checkpoints: list[CheckpointInfo]
    next_cursor: CheckpointSearchPosition | None = None
    """None after the last page."""


class ExternalWeightsUrls(Answer):
    """GET .../external_weights_urls: where the files of external weights can be downloaded."""

    urls: dict[str, str]
    """URLs by file name. They need no API key."""
    expires: datetime


class ArchiveUrl(Answer):
    """GET .../archive: where a checkpoint can be downloaded as one tar file."""

    url: str
    expires: datetime


class TrainingRunInfo(Answer):
    """One training run."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    lora_rank: int | None = None
    corrupted: bool = False
    last_request_time: datetime
    last_checkpoint: CheckpointInfo | None = None
    last_sampler_checkpoint: CheckpointInfo | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunList(Answer):
    """GET training_runs."""

    training_runs: list[TrainingRunInfo]
    cursor: Cursor


class ApiKeyInfo(Answer):
    """GET auth/apikey/me."""

    key_id: int
    name: str
    note: str
    details: dict[str, Any]
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    """Time of last use before this request, to within a minute."""
