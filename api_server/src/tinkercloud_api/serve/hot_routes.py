"""The routes outside FastAPI: those that are forwarded to session heads, and files of uploads.

A dictionary finds most of them. `route_table` lists them with those of FastAPI.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from tinkercloud_api.access.effects import READS, WORKS, Effect, changes
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.routes.checkpoints import importing
from tinkercloud_api.routes.models import chat_routes
from tinkercloud_api.routes.requests import (
    blocking,
    future_routes,
    sampling_routes,
    training_routes,
)
from tinkercloud_api.routes.requests.call import SMALL_BODY_BYTES, Handler
from tinkercloud_api.transfers import upload_urls
from tinkercloud_api.transfers.imports import MAX_CONFIG_BYTES
from tinkercloud_protocol.requests.sampling_requests import (
    CancelFutureRequest,
    NamedWeights,
    RetrieveFutureRequest,
    SampleRequest,
)
from tinkercloud_protocol.requests.training_requests import (
    AttachModelRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkercloud_protocol.responses import chat_errors
from tinkercloud_protocol.wire import recorded_paths, routes
from tinkercloud_protocol.wire.recorded_paths import RecordedPath


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The largest body of a request that is read into memory."""

    name: str
    """In the printed table."""
    max_bytes: Callable[[Settings], int]


def _fixed(name: str, max_bytes: int) -> BodyLimit:
    return BodyLimit(name, lambda _: max_bytes)


BATCH = BodyLimit("limits.max_body_bytes", lambda settings: settings.limits.max_body_bytes)
SMALL = _fixed("1 MiB", SMALL_BODY_BYTES)
JSON = _fixed("1 MiB", 1 << 20)
"""What FastAPI serves."""
CHAT = _fixed("16 MiB", routes.MAX_CHAT_BODY_BYTES)
UPLOAD = _fixed("the announced size", MAX_CONFIG_BYTES)
"""Weights are streamed up to the size that their upload announced; their configuration is not."""


@dataclass(frozen=True, slots=True)
class HotRoute:
    """A route that is served without FastAPI."""

    method: str
    path: str
    """The path; with fields in braces if it is a pattern."""
    limit: BodyLimit
    effect: Effect
    handler: Handler
    summary: str | None = None
    """In the OpenAPI document; None: it is not in there."""
    prefix: str | None = None
    """Prefix of the paths that match the pattern, if `path` is one."""
    recorded_action: str | None = None
    """Last part of the paths of recorded sessions that match the pattern, if `path` is one."""
    body: type[BaseModel] | None = None
    """The body, if it is neither a batch nor that of a chat client."""
    takes_key: bool = False
    """Whether `X-Idempotency-Key` identifies a request without a number."""


class SampleOfWeights(SampleRequest, NamedWeights):
    """POST asample and sample: `sampling_session_id`, or one of the fields that name weights."""


@dataclass(frozen=True, slots=True)
class Served:
    """The routes at a path outside FastAPI."""

    by_method: Mapping[str, HotRoute]
    recorded: RecordedPath | None = None
    """The parts of the path, if it is that of a recorded session."""


def _submission(
    path: str,
    handler: Handler,
    summary: str,
    body: type[BaseModel] | None = None,
    effect: Effect = WORKS,
) -> HotRoute:
    """Return the route of a request that a key can identify, if it has no number."""
    return HotRoute("POST", path, BATCH, effect, handler, summary, body=body, takes_key=True)


_LIST_MODELS = "List base models and the caller's checkpoints"


def _chat(method: str, path: str, effect: Effect, handler: Handler, summary: str) -> HotRoute:
    """Return a route of chat clients."""
    return HotRoute(method, path, CHAT, effect, handler, summary)


def _model(models: str, handler: Handler) -> HotRoute:
    """Return the route of one model of chat clients, below that of all of them."""
    path = models + "/{model}"
    return HotRoute("GET", path, CHAT, READS, handler, "Look up a model", prefix=models + "/")


def _recorded(method: str, action: str, effect: Effect, handler: Handler, summary: str) -> HotRoute:
    """Return a route of recorded sessions; the action is empty for the session itself."""
    path = routes.OPENAI_SESSIONS + "/{session_id}" + (f"/{action}" if action else "")
    return HotRoute(method, path, CHAT, effect, handler, summary, recorded_action=action)


HOT_ROUTES: tuple[HotRoute, ...] = (
    _submission(
        routes.FORWARD_BACKWARD,
        training_routes.forward_backward,
        "Compute losses and accumulate gradients",
    ),
    _submission(
        routes.FORWARD, training_routes.forward_in_order, "Compute losses without gradients"
    ),
    _submission(
        routes.OPTIM_STEP,
        training_routes.forward_in_order,
        "Apply the accumulated gradients",
        OptimStepRequest,
    ),
    _submission(
        routes.SAVE_WEIGHTS,
        training_routes.save_weights,
        "Save a training checkpoint",
        SaveWeightsRequest,
        changes("checkpoint_write"),
    ),
    _submission(
        routes.SAVE_WEIGHTS_FOR_SAMPLER,
        training_routes.save_weights_for_sampler,
        "Save weights for sampling",
        SaveWeightsForSamplerRequest,
        changes("checkpoint_write"),
    ),
    HotRoute(
        "POST",
        routes.SAVE_WEIGHTS_EXTERNAL,
        BATCH,
        changes("checkpoint_export"),
        training_routes.save_weights_external,
        "Save weights as files for other programs",
        body=SaveWeightsExternalRequest,
    ),
    _submission(
        routes.LOAD_WEIGHTS,
        training_routes.load_weights,
        "Load a checkpoint into a model or as a new model",
        LoadWeightsRequest,
        changes("checkpoint_read"),
    ),
    HotRoute(
        "POST",
        routes.ATTACH_MODEL,
        BATCH,
        changes("model_attach"),
        training_routes.forward_in_order,
        "Continue the order of an existing model from another client",
        body=AttachModelRequest,
    ),
    _submission(routes.ASAMPLE, sampling_routes.asample, "Sample", SampleOfWeights),
    _submission(routes.SAMPLE, blocking.sample, "Sample, and wait for the result", SampleOfWeights),
    HotRoute(
        "POST",
        routes.RETRIEVE_FUTURE,
        SMALL,
        READS,
        future_routes.retrieve_future,
        "Wait for the result of a request",
        body=RetrieveFutureRequest,
    ),
    HotRoute(
        "POST",
        routes.CANCEL_FUTURE,
        SMALL,
        WORKS,
        future_routes.cancel_future,
        "Cancel a sampling request",
        body=CancelFutureRequest,
    ),
    _chat("GET", routes.OPENAI_MODELS, READS, chat_routes.openai_models, _LIST_MODELS),
    _model(routes.OPENAI_MODELS, chat_routes.openai_model),
    _chat("POST", routes.OPENAI_CHAT, WORKS, chat_routes.forward, "Create a chat completion"),
    _chat("POST", routes.OPENAI_COMPLETIONS, WORKS, chat_routes.forward, "Create a completion"),
    _chat(
        "POST",
        routes.OPENAI_SESSIONS,
        changes("recorded_session_create"),
        chat_routes.forward,
        "Create a recorded session of a model",
    ),
    _chat(
        "GET",
        routes.OPENAI_SESSIONS,
        READS,
        chat_routes.recorded_sessions,
        "List the caller's recorded sessions",
    ),
    _recorded("GET", "", READS, chat_routes.show_recorded, "Describe a recorded session"),
    _recorded(
        "GET",
        recorded_paths.MODELS,
        READS,
        chat_routes.forward_recorded,
        "List the model of a recorded session",
    ),
    _recorded(
        "POST",
        recorded_paths.CHAT,
        WORKS,
        chat_routes.forward_recorded,
        "Create a chat completion, and record it",
    ),
    _recorded(
        "GET",
        recorded_paths.DATUMS,
        READS,
        chat_routes.forward_recorded,
        "Return recorded turns as training data",
    ),
    _recorded(
        "DELETE",
        "",
        changes("recorded_session_delete"),
        chat_routes.delete_recorded,
        "Delete a recorded session",
    ),
    _chat("GET", routes.ANTHROPIC_MODELS, READS, chat_routes.anthropic_models, _LIST_MODELS),
    _model(routes.ANTHROPIC_MODELS, chat_routes.anthropic_model),
    _chat("POST", routes.ANTHROPIC_MESSAGES, WORKS, chat_routes.forward, "Create a message"),
    _chat(
        "POST",
        routes.ANTHROPIC_COUNT_TOKENS,
        WORKS,
        chat_routes.forward,
        "Count the tokens of a message",
    ),
    HotRoute(
        "PUT",
        importing.UPLOADS + "{upload_id}/adapter_model.safetensors",
        UPLOAD,
        changes("checkpoint_import"),
        importing.receive_file,
        "Upload the weights of an adapter",
        prefix=importing.UPLOADS,
    ),
    HotRoute(
        "PUT",
        upload_urls.PREFIX + "{upload_id}/{file}",
        UPLOAD,
        changes("checkpoint_import"),
        importing.receive_file,
        prefix=upload_urls.PREFIX,
    ),
)
"""All routes outside FastAPI, as `route_table` lists them."""
EXACT_PATHS = frozenset(
    route.path for route in HOT_ROUTES if route.prefix is None and route.recorded_action is None
)


def _by_method(found: Iterable[HotRoute]) -> Served:
    return Served({route.method: route for route in found})


_EXACT: Mapping[str, Served] = {
    path: _by_method(route for route in HOT_ROUTES if route.path == path) for path in EXACT_PATHS
}
_BELOW: Mapping[str, Served] = {
    prefix: _by_method(route for route in HOT_ROUTES if route.prefix == prefix)
    for prefix in {route.prefix for route in HOT_ROUTES if route.prefix is not None}
}
_RECORDED: Mapping[str, Mapping[str, HotRoute]] = {
    action: _by_method(route for route in HOT_ROUTES if route.recorded_action == action).by_method
    for action in {each.recorded_action for each in HOT_ROUTES if each.recorded_action is not None}
}
_WITH_PATTERNS = (*chat_errors.PREFIXES, importing.UPLOADS, upload_urls.PREFIX)
"""Prefixes of all paths that fit a pattern."""
_NOTHING = Served({})


def routes_at(path: str) -> Served:
    """Return the routes at a path; none if FastAPI serves it, or nothing does."""
    if (exact := _EXACT.get(path)) is not None:
        return exact
    if not path.startswith(_WITH_PATTERNS):
        return _NOTHING
    if (recorded := recorded_paths.parse(path)) is not None:
        return Served(_RECORDED.get(recorded.action, {}), recorded)
    return next((found for prefix, found in _BELOW.items() if path.startswith(prefix)), _NOTHING)
