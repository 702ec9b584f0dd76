"""URL paths and header names, shared by the proxy, the head and their tests."""

API_KEY_HEADER = "x-api-key"

PREFIX = "/api/v1/"
"""Prefix of all paths that clients call, apart from probes and the tokenizer mirror."""
FORWARD_BACKWARD = "/api/v1/forward_backward"
FORWARD = "/api/v1/forward"
"""Forward passes in JSON, which add no gradient; the SDK sends them here before 0.25."""
UNLOAD_MODEL = "/api/v1/unload_model"
OPTIM_STEP = "/api/v1/optim_step"
SAVE_WEIGHTS = "/api/v1/save_weights"
LOAD_WEIGHTS = "/api/v1/load_weights"
SAVE_WEIGHTS_FOR_SAMPLER = "/api/v1/save_weights_for_sampler"
SAVE_WEIGHTS_EXTERNAL = "/api/v1/save_weights_external"
ASAMPLE = "/api/v1/asample"
SAMPLE = "/api/v1/sample"
"""Like `ASAMPLE`, but waits for the result."""
RETRIEVE_FUTURE = "/api/v1/retrieve_future"
CANCEL_FUTURE = "/api/v1/cancel_future"
ATTACH_MODEL = "/api/v1/attach_model"
"""Continues an existing model's order from another process, see `training.AttachModelRequest`."""

OPENAI = "/oai/api/v1"
"""Base URL of clients of OpenAI's API."""
OPENAI_CHAT = f"{OPENAI}/chat/completions"
OPENAI_COMPLETIONS = f"{OPENAI}/completions"
OPENAI_MODELS = f"{OPENAI}/models"
OPENAI_SESSIONS = "/oai/sessions"
"""POST creates a recorded session. Below it: <id>/v1, the base URL of clients of OpenAI's API,
<id>/datums, and, at heads, <id>/delete."""
ANTHROPIC = "/anthropic/api"
"""Base URL of clients of Anthropic's API, which append /v1/messages."""
ANTHROPIC_MODELS = f"{ANTHROPIC}/v1/models"
ANTHROPIC_MESSAGES = f"{ANTHROPIC}/v1/messages"
ANTHROPIC_COUNT_TOKENS = f"{ANTHROPIC_MESSAGES}/count_tokens"
MAX_CHAT_BODY_BYTES = 16 << 20
"""Maximum size of a request to these: a conversation of a million tokens has some megabytes."""

IDEMPOTENCY_HEADER = "x-idempotency-key"
"""The client's name for a request that has no seq_id: the same name is the same request, for as
long as its result is kept."""

HEAD_TOKEN_HEADER = "x-tinkercloud-head-token"  # noqa: S105
"""Proves to a head that a request comes from its API server."""
GENERATION_HEADER = "x-tinkercloud-generation"
"""The generation of the head that a request is meant for; heads of other generations reject it."""
WRONG_GENERATION_STATUS = 421
"""Status with which a head rejects a request for another generation, or for a model that another
head continues (Misdirected Request)."""
TARGET_HEADER = "x-tinkercloud-target"
"""The model or sampling session whose ownership the API server has checked."""
WAIT_HEADER = "x-tinkercloud-wait-seconds"
"""How long a head waits for the result that a retrieve_future asks for, in seconds: at most a long
poll. Without it, as long as a long poll; 0 returns at once."""
PEEK_HEADER = "x-tinkercloud-peek"
"""If present, with any value: the caller asks for a result but may not change the run: it is
kept as one that nobody has read."""
WEIGHTS_HEADER = "x-tinkercloud-weights"
"""The weights that the API server has resolved to a sampling session, as the body of the request
names them: `sampling.NamedWeights.as_header`."""
OWNER_LIMITS_HEADER = "x-tinkercloud-owner-limits"
"""The caller's current limits, as percent-encoded JSON: `owner_limits.OwnerLimits`."""
REFUSAL_HEADER = "x-tinkercloud-refusal"
"""Why the API server rejects a request, percent-encoded. The request is still forwarded to the
head, where it takes its place in its model's order and fails, whatever the path is."""

HEAD_HEALTH = "/healthz"
"""Liveness probe, without a token: 503 if the head cannot recover by itself."""
HEAD_READY = "/readyz"
"""Readiness probe, without a token: responds at once, with 503 and the reason if the head is not
ready."""
HEAD_WAIT_READY = "/readyz/wait"
"""Responds as soon as the base model is loaded."""
HEAD_STATUS = "/status"
HEAD_METRICS = "/metrics"
"""Metrics of the head for Prometheus, without a token."""
HEAD_LEASE = "/lease"
"""Held open by the API server that runs the head; see `launch.Timings.orphan_grace_seconds`."""
HEAD_MODELS = "/models"
"""PUT /models/<model id> creates a model, DELETE removes it; GET /models lists them,
`launch.HeldModels`."""
HEAD_TIMELINE = "/timeline"
"""GET /timeline/<session id> returns when the session's requests ran, `timeline.Timeline`."""
HEAD_SUSPEND_MODEL = "/suspend_model"
"""POST /suspend_model/<model id> writes an unused model to the object store and frees its memory;
returns `head_messages.ModelSuspended`. The next request for the model resumes it."""
HEAD_SAVE_MODEL = "/save_model"
"""POST /save_model/<model id> writes a training checkpoint of a model between two of its requests,
`head_messages.SaveModel`; returns `head_messages.ModelSaved`."""
HEAD_MOVE_MODEL = "/move_model"
"""POST /move_model/<model id> writes a model to the object store, in use or not, and responds when
another head can continue it. From then on requests for it get `WRONG_GENERATION_STATUS`. DELETE
lets this head continue it after all, which requires that no other head has resumed it."""
HEAD_ENGINES = "/engines"
"""POST `engine_scaling.Engines`, the number of engines that exist; responds with the number that
the head needs, once they differ or `HOLD_SECONDS` have passed."""
HEAD_SUSPEND = "/suspend"
"""POST writes the head's whole state to the object store and responds when nothing can be lost. The
head rejects new requests from the start of this request."""
HEAD_CHECKPOINT = "/checkpoint"
"""POST writes a training checkpoint of every model, or POST /checkpoint/<model id> of one, and
returns their paths, `launch.Saved`."""
HEAD_FORGET_RESULTS = "/forget_results"
"""POST drops the results of one owner that were delivered, `head_messages.ForgetResults`; returns
`head_messages.Forgotten`."""
HEAD_RECORDED = "/recorded_sessions"
"""POST: list the recorded sessions of an owner (RecordedSessionsOf -> RecordedSessionList)."""
HEAD_SAMPLED_RUNS = "/sampled_runs"
"""PUT `head_messages.SampledRuns`: the runs whose samples the head reports from then on."""
HEAD_SAMPLERS = "/samplers"
"""PUT /samplers/<sampling session id> registers a sampling session, DELETE removes it."""
