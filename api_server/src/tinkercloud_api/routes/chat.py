"""OpenAI- and Anthropic-compatible endpoints: which weights a request means, and who may use them.

The head of the weights renders the conversation, samples and writes the answer; its bytes are
streamed to the client. Errors have the shape that the clients of each endpoint expect. Other paths
below the prefixes are answered with 404.
"""

import asyncio
from typing import Any
from urllib.parse import unquote

import orjson

from tinkercloud_api.auth import Principal
from tinkercloud_api.catalog.statements import Page
from tinkercloud_api.context import Context
from tinkercloud_api.model_names import model_of
from tinkercloud_api.routes.call import Call, wait_for_head
from tinkercloud_protocol import routes
from tinkercloud_protocol.asgi import respond
from tinkercloud_protocol.errors import InvalidRequest, NotFound
from tinkercloud_protocol.exact_json import read_body
from tinkercloud_protocol.sampling import NamedWeights

_SMALL_BODY_BYTES = 64 << 10
_MAX_CHECKPOINTS = 1000
"""Checkpoints in the list of models, the latest first."""
PATHS = (
    routes.OPENAI_CHAT,
    routes.OPENAI_COMPLETIONS,
    routes.OPENAI_MODELS,
    routes.OPENAI_SESSIONS,
    routes.ANTHROPIC_MESSAGES,
    routes.ANTHROPIC_COUNT_TOKENS,
)
_RECORDED = {("POST", "v1/chat/completions"), ("GET", "datums"), ("DELETE", "")}
"""Methods, and what follows the name of a recorded session in the path."""
_FORWARDED = frozenset(PATHS) - {routes.OPENAI_MODELS}


async def serve(call: Call) -> None:
    """Answer a request of any method to any path below the prefixes.

    Raises:
        NotFound: the path or the model does not exist for this caller.
        InvalidRequest: the body names no model, or names one in a wrong form.
        Unavailable: the head is not ready; the message states the reason.
    """
    request = call.request
    if request.method == "POST" and request.path in _FORWARDED:
        await _forward(call)
    elif request.path.startswith(routes.OPENAI_SESSIONS + "/"):
        await _serve_recorded(call)
    elif request.method == "GET" and request.path == routes.OPENAI_MODELS:
        models = await _models(call.server, call.principal)
        await respond(call.send, orjson.dumps({"object": "list", "data": models}))
    elif request.method == "GET" and request.path.startswith(routes.OPENAI_MODELS + "/"):
        name = unquote(request.path.removeprefix(routes.OPENAI_MODELS + "/"))
        await call.server.sampling_sessions.check(weights_of(name, call.server), call.principal)
        await respond(call.send, orjson.dumps(_model(name)))
    else:
        raise NotFound(
            f"{request.method} {request.path} is not supported by this server;"
            " docs/use/openai.md lists the supported calls"
        )


async def _forward(call: Call) -> None:
    server = call.server
    body = await call.request.body(routes.MAX_CHAT_BODY_BYTES)
    is_small = len(body) < _SMALL_BODY_BYTES
    name = _model_in(body) if is_small else await asyncio.to_thread(_model_in, body)
    sampler_id = await server.sampling_sessions.of(weights_of(name, server), call.principal)
    await _forward_to_sampler(call, call, sampler_id, body)


async def _serve_recorded(call: Call) -> None:
    """Forward a call of a recorded session, whose name starts with its sampling session.

    Raises:
        NotFound: the path or the session does not exist for this caller.
    """
    method, path = call.request.method, call.request.path
    name, _, action = path.removeprefix(routes.OPENAI_SESSIONS + "/").partition("/")
    sampler_id, separator, _ = name.partition("~")
    if not separator or (method, action) not in _RECORDED:
        raise NotFound(
            f"{method} {path[:256]} is not supported by this server; docs/use/openai.md lists the"
            " supported calls"
        )
    body = await call.request.body(routes.MAX_CHAT_BODY_BYTES)
    target = call
    if method == "DELETE":
        target = call.of_own(f"{path}/delete", body, call.send)
    await _forward_to_sampler(call, target, sampler_id, body)


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
    await locator.authorize_sampler(sampler_id, call.principal)
    if (run_id := await locator.run_of_sampler(sampler_id)) is not None:
        server.activity.touch(run_id)
    endpoint = await wait_for_head(
        locator.head_of_sampler(sampler_id), lambda: locator.sampler_pending(sampler_id)
    )
    seconds = server.settings.sample_wait_seconds
    forwarding = asyncio.ensure_future(
        forwarded.forward(endpoint, sampler_id, body, timeout_seconds=seconds)
    )
    gone = asyncio.create_task(call.request.wait_until_disconnected())
    try:
        await asyncio.wait({forwarding, gone}, return_when=asyncio.FIRST_COMPLETED)
        if forwarding.done():
            await forwarding
    finally:
        gone.cancel()
        # The head notices that its connection is closed, and cancels the samples.
        forwarding.cancel()
        await asyncio.gather(gone, forwarding, return_exceptions=True)


def _model_in(body: bytes) -> str:
    content = read_body(body)
    name = content.get("model") if isinstance(content, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= 1024 or "\0" in name:
        raise InvalidRequest("model: required, and must be the name of a model")
    return name


def weights_of(name: str, server: Context) -> NamedWeights:
    """Return the weights that a model's name means.

    `<base model>`, `tinker://<run>/sampler_weights/<name>`, `<base model>;<tinker path>`, or the id
    of a model in training, whose current weights are sampled.

    Raises:
        NotFound: the base model is not served.
        InvalidRequest: the name is malformed.
    """
    base, separator, path = name.partition(";")
    if not separator and name.startswith("tinker://"):
        return NamedWeights.read({"model_path": name})
    if not separator and ":train:" in name:
        return NamedWeights.read({"model_id": name})
    if model_of(base, server.provider.models()) is None:
        raise NotFound(
            f"model: {base[:256]!r} is not served; GET {routes.OPENAI_MODELS} lists the models"
        )
    if separator:
        return NamedWeights.read({"base_model": base, "model_path": path})
    return NamedWeights.read({"base_model": base})


def _model(name: str, created: int = 0, owner: str = "tinkercloud") -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}


async def _models(server: Context, principal: Principal) -> list[dict[str, Any]]:
    """Return the base models with their aliases, and the caller's checkpoints for sampling."""
    served = [_model(name) for model in server.provider.models() for name in model.names]
    page = Page(offset=0, limit=_MAX_CHECKPOINTS)
    saved, _ = await server.checkpoints.page(principal.visible("accessible"), page)
    return served + [
        _model(info.tinker_path, int(info.time.timestamp()), principal.owner)
        for info in saved
        if info.checkpoint_type == "sampler" and info.damage is None
    ]
