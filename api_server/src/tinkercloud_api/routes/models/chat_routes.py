"""OpenAI- and Anthropic-compatible endpoints: which weights a request means, and who may use them.

The head of the weights renders the conversation, samples and writes the answer; its bytes are
streamed to the client. Errors have the shape that the clients of each endpoint expect.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs, unquote

import orjson

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.config.readable import moment
from tinkercloud_api.context import Context
from tinkercloud_api.providers.base import Pending
from tinkercloud_api.providers.model_names import model_of
from tinkercloud_api.routes.requests.call import Call, wait_for_head
from tinkercloud_protocol.heads.head_messages import RecordedSessionList
from tinkercloud_protocol.requests.sampling_requests import NamedWeights
from tinkercloud_protocol.responses import chat_errors
from tinkercloud_protocol.wire import recorded_paths, routes
from tinkercloud_protocol.wire.asgi import respond
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_protocol.wire.exact_json import read_body
from tinkercloud_protocol.wire.paths import SCHEME, CheckpointPath

_SMALL_BODY_BYTES = 64 << 10
_MAX_CHECKPOINTS = 1000
"""Checkpoints in the list of models, the latest first."""
_MAX_NAMED = 5
"""Served models that an error lists by name."""
_SERVER = "tinkercloud"
"""Owner of base models."""
_WEIGHTS_FIELD = re.compile(r"^(base_model|model_path|model_id|model):? ")
"""How messages about weights begin that name a field."""


_INSTEAD = {
    f"{routes.OPENAI}/responses": f"send the conversation to {routes.OPENAI_CHAT}",
    f"{routes.OPENAI}/embeddings": "it serves models that write text, and no embeddings",
}
"""What to do instead of calls that clients of OpenAI's API often make."""


async def reject_unknown(call: Call) -> None:
    """Reject a request to an unknown path below the prefixes.

    Raises:
        NotFound: always.
    """
    path = call.request.path
    session = path.removeprefix(f"{routes.OPENAI_SESSIONS}/")
    if session != path and call.recorded is None:
        name = session.partition("/")[0][:256]
        raise NotFound(
            f"recorded session {name!r} is unknown; POST {routes.OPENAI_SESSIONS} creates one"
        )
    known = [text for name, text in _INSTEAD.items() if f"{path}/".startswith(f"{name}/")]
    instead = known[0] if known else f"{chat_errors.BASE_URLS}; /openapi.json lists the calls"
    raise NotFound(f"{call.request.method} {path[:256]} is not supported by this server; {instead}")


async def forward(call: Call) -> None:
    """Forward a request to the head of the weights that its body names.

    Raises:
        NotFound: the model does not exist for this caller.
        InvalidRequest: the body names no model, or names one in a wrong form.
        Unavailable: the head is not ready; the message states the reason.
    """
    server = call.server
    body = await call.request.body()
    is_small = len(body) < _SMALL_BODY_BYTES
    name = _model_in(body) if is_small else await asyncio.to_thread(_model_in, body)
    is_anthropic = call.request.path.startswith(routes.ANTHROPIC)
    models = routes.ANTHROPIC_MODELS if is_anthropic else routes.OPENAI_MODELS
    with _named_model():
        weights = weights_of(name, server, models)
        sampler_id = await server.sampling_sessions.of(weights, call.principal)
    await _forward_to_sampler(call, call, sampler_id, body)


@contextmanager
def _named_model() -> Iterator[None]:
    """Let errors about the weights name the field that clients of these endpoints send."""
    try:
        yield
    except (InvalidRequest, NotFound) as error:
        message = _WEIGHTS_FIELD.sub("", error.message)
        raise type(error)(f"model: {message}") from None


async def forward_recorded(call: Call) -> None:
    """Forward a call of a recorded session to its head.

    Raises:
        NotFound: the session does not exist for this caller.
        Unavailable: the head is not ready; the message states the reason.
    """
    body = await call.request.body()
    await _forward_to_sampler(call, call, _sampler_of(call), body)


async def show_recorded(call: Call) -> None:
    """Describe a recorded session; raises as `forward_recorded` does."""
    await _forward_action(call, recorded_paths.SHOW)


async def delete_recorded(call: Call) -> None:
    """Delete a recorded session; raises as `forward_recorded` does."""
    await _forward_action(call, recorded_paths.DELETE)


async def _forward_action(call: Call, action: str) -> None:
    body = await call.request.body()
    own = call.of_own(f"{call.request.path}/{action}", body, call.send)
    await _forward_to_sampler(call, own, _sampler_of(call), body)


@names_no_object
async def recorded_sessions(call: Call) -> None:
    """List the caller's recorded sessions that it may still use, the oldest first.

    Raises:
        Unavailable: a session head did not respond.
    """
    server = call.server
    found = await server.shared_heads.recorded_sessions(call.principal.owner)
    usable: dict[str, bool] = {}
    for sampler_id in {recorded_paths.sampler_of(each.id) for each in found}:
        try:
            await server.locator.known.authorize_sampler(sampler_id, call.principal)
        except NotFound:
            # It belongs to a project that the caller has left, or was deleted.
            usable[sampler_id] = False
    listed = [each for each in found if usable.get(recorded_paths.sampler_of(each.id), True)]
    await respond(call.send, RecordedSessionList(data=listed).model_dump_json().encode())


def _sampler_of(call: Call) -> str:
    assert call.recorded is not None  # noqa: S101 - the path of the route
    return call.recorded.sampler_id


async def _forward_to_sampler(call: Call, forwarded: Call, sampler_id: str, body: bytes) -> None:
    """Forward a request to the head of a sampling session until the client disconnects.

    Args:
        call: the client's request.
        forwarded: the request for the head.
        sampler_id: the sampling session.
        body: the body of the request.

    Raises:
        NotFound: the session does not exist for this caller.
        Unavailable: the head is not ready; the message states the reason.
    """
    server, locator = call.server, call.server.locator
    await locator.known.authorize_sampler(sampler_id, call.principal)
    if (run_id := await locator.known.run_of_sampler(sampler_id)) is not None:
        server.activity.touch(run_id)
    endpoint = await wait_for_head(
        locator.head_of_sampler(sampler_id), lambda: _again(locator.sampler_pending(sampler_id))
    )
    seconds = server.settings.sample_wait_seconds
    # The head notices that a connection is closed, and cancels the samples.
    await call.request.run_until_disconnected(
        forwarded.forward(endpoint, sampler_id, body, timeout_seconds=seconds)
    )


def _again(pending: Pending) -> Pending:
    """Return why a head is not ready, with what to do: clients of chats know no queue."""
    if pending.reason.endswith(" again"):
        return pending
    return replace(pending, reason=f"{pending.reason}; send it again")


def _model_in(body: bytes) -> str:
    content = read_body(body)
    name = content.get("model") if isinstance(content, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= 1024 or "\0" in name:
        raise InvalidRequest("model: required, and must be the name of a model")
    return name


def weights_of(name: str, server: Context, models: str = routes.OPENAI_MODELS) -> NamedWeights:
    """Return the weights that a model's name means.

    `<base model>`, `tinker://<run>/sampler_weights/<name>`, `<base model>;<tinker path>`, or the id
    of a model in training, whose current weights are sampled.

    Args:
        name: the model's name.
        server: the server.
        models: the path that lists the models for the client.

    Raises:
        NotFound: the base model is not served.
        InvalidRequest: the name is malformed.
    """
    base, separator, path = name.partition(";")
    if not separator and name.startswith(SCHEME):
        try:
            CheckpointPath.parse(name)
        except InvalidRequest as error:
            form = f"{SCHEME}RUN/sampler_weights/NAME"
            raise InvalidRequest(f"{name[:256]!r} is not {form}: {error.message}") from None
        return NamedWeights.read({"model_path": name})
    if not separator and ":train:" in name:
        return NamedWeights.read({"model_id": name})
    if model_of(base, server.provider.models()) is None:
        names = [repr(name) for model in server.provider.models() for name in model.names]
        served = f"served: {', '.join(names)}; " if 0 < len(names) <= _MAX_NAMED else ""
        raise NotFound(f"model: {base[:256]!r} is not served; {served}GET {models} lists all")
    if separator:
        return NamedWeights.read({"base_model": base, "model_path": path})
    return NamedWeights.read({"base_model": base})


@dataclass(frozen=True, slots=True)
class _Model:
    """A model that can be sampled."""

    name: str
    owner: str
    created: datetime

    def for_openai(self) -> dict[str, Any]:
        created = int(self.created.timestamp())
        return {"id": self.name, "object": "model", "created": created, "owned_by": self.owner}

    def for_anthropic(self) -> dict[str, Any]:
        return {
            "type": "model",
            "id": self.name,
            "display_name": self.name,
            "created_at": moment(self.created),
        }


_STARTED = now().replace(microsecond=0)
"""Since when base models and models in training are served by this process."""


@names_no_object
async def openai_models(call: Call) -> None:
    """Return all models, as https://platform.openai.com/docs/api-reference/models describes it."""
    models = [model.for_openai() for model in await _models(call.server, call.principal)]
    await respond(call.send, orjson.dumps({"object": "list", "data": models}))


async def openai_model(call: Call) -> None:
    """Return one model.

    Raises:
        NotFound: it does not exist for this caller.
        InvalidRequest: its name is malformed.
    """
    model = await _looked_up(call, routes.OPENAI_MODELS)
    await respond(call.send, orjson.dumps(model.for_openai()))


@names_no_object
async def anthropic_models(call: Call) -> None:
    """Return a page of models, as https://docs.anthropic.com/en/api/models-list describes it.

    Raises:
        InvalidRequest: the query is malformed.
    """
    page = _page_of(await _models(call.server, call.principal), parse_qs(call.request.query))
    await respond(call.send, orjson.dumps(page))


async def anthropic_model(call: Call) -> None:
    """Return one model.

    Raises:
        NotFound: it does not exist for this caller.
        InvalidRequest: its name is malformed.
    """
    model = await _looked_up(call, routes.ANTHROPIC_MODELS)
    await respond(call.send, orjson.dumps(model.for_anthropic()))


def _page_of(models: Sequence[_Model], query: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a page of models.

    Args:
        models: all models.
        query: `limit`, 1 to 1000 (20); `after_id` or `before_id`, the name of a model.

    Raises:
        InvalidRequest: one of them has another value.
    """
    names = [model.name for model in models]
    limit = query.get("limit", ["20"])[0]
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= len(str(_MAX_CHECKPOINTS))
    if not is_number or not 1 <= int(limit) <= _MAX_CHECKPOINTS:
        raise InvalidRequest(f"limit: must be 1 to {_MAX_CHECKPOINTS}, got {limit[:40]!r}")
    size, start, stop = int(limit), 0, len(names)
    for field in ("after_id", "before_id"):
        name = query.get(field, [""])[0]
        if name and name not in names:
            raise InvalidRequest(f"{field}: {name[:256]!r} is not among the models")
        if name and field == "after_id":
            start = names.index(name) + 1
        elif name:
            stop = names.index(name)
            start = max(start, stop - size)
    shown = models[start : min(start + size, stop)]
    goes_back = bool(query.get("before_id"))
    return {
        "data": [model.for_anthropic() for model in shown],
        "first_id": shown[0].name if shown else None,
        "last_id": shown[-1].name if shown else None,
        "has_more": start > 0 if goes_back else start + len(shown) < stop,
    }


async def _looked_up(call: Call, models: str) -> _Model:
    """Return the model that a path below a list of models names.

    Raises:
        NotFound: it does not exist for this caller.
        InvalidRequest: its name is malformed.
    """
    server, name = call.server, unquote(call.request.path.removeprefix(models + "/"))
    with _named_model():
        weights = weights_of(name, server, models)
        saved_at = await server.sampling_sessions.check(weights, call.principal)
    if saved_at is None:
        return _Model(name, _SERVER, _STARTED)
    return _Model(name, call.principal.owner, saved_at)


async def _models(server: Context, principal: Principal) -> list[_Model]:
    """Return the base models with their aliases, and the caller's checkpoints for sampling."""
    names = [name for model in server.provider.models() for name in model.names]
    page = Page(offset=0, limit=_MAX_CHECKPOINTS)
    saved, _ = await server.checkpoints.page(principal.visible("accessible"), page)
    return [_Model(name, _SERVER, _STARTED) for name in names] + [
        _Model(info.tinker_path, principal.owner, info.time)
        for info in saved
        if info.checkpoint_type == "sampler" and info.damage is None
    ]
