"""URL paths and header names: one truth for the proxy, the head and their tests."""

API_KEY_HEADER = "x-api-key"

FORWARD_BACKWARD = "/api/v1/forward_backward"
OPTIM_STEP = "/api/v1/optim_step"
SAVE_WEIGHTS = "/api/v1/save_weights"
LOAD_WEIGHTS = "/api/v1/load_weights"
SAVE_WEIGHTS_FOR_SAMPLER = "/api/v1/save_weights_for_sampler"
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

HEAD_HEALTH = "/healthz"
"""Answers as soon as the process serves; needs no token."""
HEAD_READY = "/readyz"
"""Answers once the base model is loaded, and waits until then."""
HEAD_STATUS = "/status"
HEAD_LEASE = "/lease"
"""Held open by the API server that runs the head; see `launch.Timings.orphan_grace_seconds`."""
HEAD_MODELS = "/models"
"""PUT /models/<model id> creates one, DELETE lets it go."""
HEAD_SUSPEND = "/suspend"
"""POST writes all that the head holds to the object store, and answers when nothing can be lost any
more. From its beginning on the head refuses new requests."""
HEAD_CHECKPOINT = "/checkpoint"
"""POST writes a training checkpoint of every model; answers with their paths, `launch.Saved`."""
HEAD_SAMPLERS = "/samplers"
"""PUT /samplers/<sampling session id> makes one known, DELETE lets it go."""
