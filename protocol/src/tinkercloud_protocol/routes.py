"""URL paths and header names: one truth for the proxy, the head and their tests."""

API_KEY_HEADER = "x-api-key"

FORWARD_BACKWARD = "/api/v1/forward_backward"
OPTIM_STEP = "/api/v1/optim_step"
SAVE_WEIGHTS = "/api/v1/save_weights"
LOAD_WEIGHTS = "/api/v1/load_weights"
SAVE_WEIGHTS_FOR_SAMPLER = "/api/v1/save_weights_for_sampler"
SAVE_WEIGHTS_EXTERNAL = "/api/v1/save_weights_external"
ASAMPLE = "/api/v1/asample"
RETRIEVE_FUTURE = "/api/v1/retrieve_future"
CANCEL_FUTURE = "/api/v1/cancel_future"

HEAD_TOKEN_HEADER = "x-tinkercloud-head-token"  # noqa: S105
"""Proves to a head that a request comes from its API server."""
GENERATION_HEADER = "x-tinkercloud-generation"
"""The generation of the head that a request is meant for; a head of another one refuses it."""
WRONG_GENERATION_STATUS = 421
"""With which a head refuses a request that is meant for another one (Misdirected Request)."""
TARGET_HEADER = "x-tinkercloud-target"
"""The model or sampling session whose ownership the API server has checked."""
REFUSAL_HEADER = "x-tinkercloud-refusal"
"""Why the API server refuses a request, percent-encoded. It goes to the head all the same, which
lets it take its place in its model's order and fail there."""

HEAD_HEALTH = "/healthz"
"""A liveness probe, without a token: 503 if the head will never get on by itself."""
HEAD_READY = "/readyz"
"""A readiness probe, without a token: answers at once, 503 and the reason if it is not ready."""
HEAD_WAIT_READY = "/readyz/wait"
"""Answers once the base model is loaded, and waits until then."""
HEAD_STATUS = "/status"
HEAD_METRICS = "/metrics"
"""What the head counts, for Prometheus, without a token."""
HEAD_LEASE = "/lease"
"""Held open by the API server that runs the head; see `launch.Timings.orphan_grace_seconds`."""
HEAD_MODELS = "/models"
"""PUT /models/<model id> creates one, DELETE removes it; GET /models lists them,
`launch.HeldModels`."""
HEAD_SUSPEND_MODEL = "/suspend_model"
"""POST /suspend_model/<model id> writes a model that nobody uses to the object store and frees its
memory; answers `launch.ModelSuspended`. The next request for the model brings it back."""
HEAD_SUSPEND = "/suspend"
"""POST writes all that the head holds to the object store, and answers when nothing can be lost any
more. From its beginning on the head refuses new requests."""
HEAD_CHECKPOINT = "/checkpoint"
"""POST writes a training checkpoint of every model; answers with their paths, `launch.Saved`."""
HEAD_SAMPLERS = "/samplers"
"""PUT /samplers/<sampling session id> makes one known, DELETE lets it go."""
