"""Training requests: forward_backward, optim_step, and saving and loading weights.

The session head of the model executes them. The server reads only as much of a body as it needs to
find that head and to record the checkpoints and sampling sessions that the request creates.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from http import HTTPStatus
from typing import TypeVar

import orjson

from tinkercloud_api.catalog.schema.tables import SamplingSession
from tinkercloud_api.routes.requests.call import (
    SMALL_BODY_BYTES,
    Call,
    Destination,
    Handler,
    head_for_run,
)
from tinkercloud_api.routes.requests.rejections import (
    RequestT,
    SaveRequest,
    forward_rejection,
    sequence_position,
)
from tinkercloud_api.web.asgi_http import chain, read_prefix
from tinkercloud_protocol.requests.training_requests import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    default_name,
)
from tinkercloud_protocol.wire import envelope, future_responses
from tinkercloud_protocol.wire.asgi import Message, check_encoding, decompress, respond
from tinkercloud_protocol.wire.errors import BodyTooLarge, InvalidRequest, NotFound
from tinkercloud_protocol.wire.ids import ModelId, RequestId, SamplingSessionId
from tinkercloud_protocol.wire.json_model import parse_json
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

SaveT = TypeVar("SaveT", bound=SaveRequest)
_UNNAMED = "unnamed"
"""Placeholder for the name that a head chooses."""


def in_order(handle: Callable[[Call, bytes], Awaitable[None]]) -> Handler:
    """Return a handler of JSON requests that have a position in their model's sequence.

    A request that is too long fails in its position, if the start of its body states one.
    """

    @wraps(handle)
    async def handler(call: Call) -> None:
        try:
            body = await call.request.body()
        except BodyTooLarge as error:
            position = envelope.peek_json_place(call.request.prefix)
            await forward_rejection(call, position, error)
        else:
            await handle(call, body)

    return handler


async def forward_backward(call: Call) -> None:
    """Stream a protobuf body to the model's head, or forward a JSON body."""
    if future_responses.is_json(call.request.headers.get("content-type", "")):
        await forward_in_order(call)
        return
    check_encoding(call.request.headers, accepted=("zstd",))
    async with aclosing(call.request.chunks()) as chunks:
        prefix = await read_prefix(chunks, envelope.PREFIX_BYTES)
        encoding = call.request.headers.get("content-encoding", "identity")
        is_plain = encoding != "zstd"
        plain = prefix if is_plain else decompress(prefix, envelope.PREFIX_BYTES)
        model_id = envelope.peek_training(plain[: envelope.PREFIX_BYTES]).model_id
        destination = await head_for_run(call, model_id)
        await call.submit(destination, chain(prefix, chunks))


@in_order
async def forward_in_order(call: Call, body: bytes) -> None:
    """Forward a JSON request to the head of its model."""
    model_id = envelope.peek_json(body, "model_id")
    await call.submit(await head_for_run(call, model_id), body)


@in_order
async def save_weights(call: Call, body: bytes) -> None:
    """Forward a save request and record the checkpoint that it may create."""
    destination, request = await _routed(call, SaveWeightsRequest, body)
    if request is None:
        await call.submit(destination, body)
    elif request.path is None and request.seq_id is None:
        await _forward_unnamed_save(call, destination, body, CheckpointKind.TRAINING)
    else:
        path = _path_or_none(destination.target, CheckpointKind.TRAINING, request.name())
        await _forward_save(call, destination, request, body, path)


@in_order
async def save_weights_for_sampler(call: Call, body: bytes) -> None:
    """Forward a save for sampling and record the checkpoint or sampling session it may create."""
    destination, request = await _routed(call, SaveWeightsForSamplerRequest, body)
    if request is not None:
        index, name = request.sampling_session_seq_id, request.name()
        if index is not None:
            try:
                await _record_sampler(call, ModelId.parse(destination.target), index)
            except InvalidRequest as error:
                await forward_rejection(call, sequence_position(request), error)
                return
        elif request.path is None and request.seq_id is None:
            await _forward_unnamed_save(call, destination, body, CheckpointKind.SAMPLER)
            return
        elif name is not None:
            path = _path_or_none(destination.target, CheckpointKind.SAMPLER, name)
            await _forward_save(call, destination, request, body, path)
            return
    await call.submit(destination, body)


@in_order
async def save_weights_external(call: Call, body: bytes) -> None:
    """Forward a save for other programs and record the checkpoint that it may create."""
    destination, request = await _routed(call, SaveWeightsExternalRequest, body)
    if request is None:
        await call.submit(destination, body)
    else:
        path = _path_or_none(destination.target, CheckpointKind.EXTERNAL, request.path)
        await _forward_save(call, destination, request, body, path)


async def _routed(call: Call, model: type[SaveT], body: bytes) -> tuple[Destination, SaveT | None]:
    """Return where a save request goes, and the request.

    It is None if it is invalid, or names another model further on: then the head rejects it.
    """
    destination = await head_for_run(call, envelope.peek_json(body, "model_id"))
    try:
        request = await _parse(model, body)
    except InvalidRequest:
        return destination, None
    return destination, request if request.model_id == destination.target else None


@in_order
async def load_weights(call: Call, body: bytes) -> None:
    """Create a run from a checkpoint, or forward a load into an existing model.

    In both cases the caller must have read access to the checkpoint.
    """
    try:
        request = await _parse(LoadWeightsRequest, body)
    except InvalidRequest as error:
        await forward_rejection(call, body, error)
        return
    token, server = request.weights_access_token, call.server
    if request.model_id is None:
        reader = await server.authenticator.reader(call.principal, token)
        request_id = await server.training_runs.create_from_checkpoint(
            request, call.principal, reader
        )
        await respond(call.send, future_responses.promise(request_id))
        return
    try:
        path = CheckpointPath.parse(request.path)
        path.require_loadable()
        reader = await server.authenticator.reader(call.principal, token)
        await server.checkpoints.manifest(path, reader)
        call.principal.named_objects.add(str(path))
    except (InvalidRequest, NotFound) as error:
        await forward_rejection(call, sequence_position(request), error)
        return
    if token is not None:
        # The head keeps bodies of waiting requests in the checkpoint store.
        body = (
            request.model_copy(update={"weights_access_token": None})
            .model_dump_json(exclude_none=True)
            .encode()
        )
    await call.submit(await head_for_run(call, request.model_id), body)


async def _forward_save(
    call: Call,
    destination: Destination,
    request: SaveRequest,
    body: bytes,
    path: CheckpointPath | None,
) -> None:
    """Forward a save request; `path` is None if the head is going to reject the request."""

    async def forward() -> int | None:
        await call.submit(destination, body)
        return call.status

    if path is None:
        await forward()
        return
    checkpoints, settings = call.server.checkpoints, call.server.settings
    try:
        await checkpoints.check_quota(path, settings.max_checkpoint_bytes_per_owner)
    except InvalidRequest as error:
        await forward_rejection(call, sequence_position(request), error)
        return
    await checkpoints.record_pending_unless_rejected(path, call.principal.owner, forward)


async def _forward_unnamed_save(
    call: Call, destination: Destination, body: bytes, kind: CheckpointKind
) -> None:
    """Forward a save request without a name and without the number that its name derives from.

    The head numbers it. Its checkpoint is recorded then, before the client receives the response;
    if the server stops in between, the client has no response, and the checkpoint of its request
    is only listed after `tinkercloud catalog rebuild`.
    """
    checkpoints, settings = call.server.checkpoints, call.server.settings
    unnamed = CheckpointPath(destination.target, kind, _UNNAMED)
    await checkpoints.check_quota(unnamed, settings.max_checkpoint_bytes_per_owner)
    response: list[Message] = []

    async def keep(message: Message) -> None:
        response.append(message)

    asked = replace(call, raw_send=keep)
    await asked.submit(destination, body)
    if asked.status == HTTPStatus.OK:
        promise = orjson.loads(b"".join(message.get("body", b"") for message in response))
        name = default_name(RequestId.parse(promise["request_id"]).seq_id)
        named = replace(unnamed, name=name)
        await call.server.catalog.record_pending_checkpoint(named, call.principal.owner)
    for message in response:
        await call.send(message)


async def _record_sampler(call: Call, model_id: ModelId, index: int) -> None:
    """Record the sampling session that a save without a name creates.

    Raises:
        InvalidRequest: its sequence number was already used for other weights.
    """
    run = await call.server.catalog.run(str(model_id))
    if run is not None:
        row = SamplingSession(
            id=str(SamplingSessionId(model_id.session_id, index)),
            session_id=model_id.session_id,
            owner=run.owner,
            base_model=run.base_model,
            model_path=None,
            run_id=run.id,
        )
        await call.server.locator.known.add_sampler(row)


def _path_or_none(run_id: str, kind: CheckpointKind, name: str) -> CheckpointPath | None:
    """Return a path, or None if it is invalid, in which case the head rejects the request."""
    try:
        return CheckpointPath(run_id, kind, name)
    except InvalidRequest:
        return None


async def _parse(model: type[RequestT], body: bytes) -> RequestT:
    """Parse a request; long ones are parsed in a thread, off the event loop.

    Raises:
        InvalidRequest: the body is not a valid request.
    """
    if len(body) > SMALL_BODY_BYTES:
        return await asyncio.to_thread(parse_json, model, body)
    return parse_json(model, body)
