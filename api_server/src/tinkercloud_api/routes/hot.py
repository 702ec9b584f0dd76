"""The hot paths: everything a head serves, forwarded as bytes.

Plain ASGI, without FastAPI: bodies are read only as far as needed to route them. Before anything
goes to a head, the key is checked, and that what the request is about belongs to its holder.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing

import orjson
import structlog
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp

from tinkercloud_api.auth import Principal
from tinkercloud_api.catalog.tables import SamplingSession
from tinkercloud_api.context import Context
from tinkercloud_api.http import (
    DISCARD,
    DISCARD_WITHOUT_KEY,
    HotRequest,
    Receive,
    Scope,
    Send,
    chain,
    check_content_encoding,
    decompress_prefix,
    drain_body,
    read_prefix,
    reject_duplicate_headers,
    respond,
    respond_error,
)
from tinkercloud_api.long_polls import ShuttingDown
from tinkercloud_api.providers.base import HeadEndpoint, Pending
from tinkercloud_api.routes import unloading
from tinkercloud_api.routes.call import Call, Handler, head_for_run, wait_for_head
from tinkercloud_api.routes.rejections import (
    OLD_SDK,
    RequestT,
    forward_rejection,
    reject_in_sequence,
    reject_unknown_call,
    sequence_position,
)
from tinkercloud_api.throttle import Throttle
from tinkercloud_protocol import envelope, futures, routes
from tinkercloud_protocol.errors import (
    BodyTooLarge,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    Unavailable,
    WireError,
)
from tinkercloud_protocol.ids import ModelId, RequestId, SamplingSessionId
from tinkercloud_protocol.paths import CheckpointKind, CheckpointPath
from tinkercloud_protocol.sampling import RetrieveFutureRequest
from tinkercloud_protocol.training import (
    LoadWeightsRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkercloud_protocol.wire import parse_json

log = structlog.get_logger(__name__)

_SMALL_BODY_BYTES = 1 << 20
_RETRY_SECONDS = 1.0
_POLL_MARGIN_SECONDS = 20.0
"""Of a head after a long poll's end: the SDK itself waits 25 s more than polls last by default."""
_KEY_HEADER = routes.API_KEY_HEADER.encode()
_WITHOUT_KEY = {"/api/v1/healthz"}
"""Besides everything that is no API call: probes, the tokenizer mirror, the description."""
_INTERNAL_ERROR = b'{"detail": "internal error; the log of the server has the details"}'
_GONE = (410, orjson.dumps({"detail": "this result is gone; send the request again"}))


class HotPaths:
    """ASGI middleware, the outermost: serves the hot paths, hands everything else on.

    Nothing but a dictionary look-up stands between the server and these handlers: the framework's
    own routing costs more than all that they do.
    """

    def __init__(
        self, app: ASGIApp, server: Callable[[], Context], routed: Sequence[BaseRoute]
    ) -> None:
        """Wrap an application.

        Args:
            app: serves every other path.
            server: returns the server's parts, which exist once it runs.
            routed: routes of the application.
        """
        self._app = app
        self._server = server
        self._routed = routed
        self._throttle = Throttle()

    async def _authenticate(self, scope: Scope) -> Principal | None:
        """Return who is asking; None for what needs no key. Nothing of a body is read for it.

        Raises:
            InvalidRequest: a header came twice.
            Unauthenticated: the key is missing, unknown or revoked.
            Overloaded: too many unknown ones came from the same address.
        """
        reject_duplicate_headers(scope["headers"])
        path: str = scope["path"]
        if not path.startswith(routes.PREFIX) or path in _WITHOUT_KEY:
            return None
        authenticator = self._server().authenticator
        key = dict(scope["headers"]).get(_KEY_HEADER, b"").decode("latin-1") or None
        address = (scope.get("client") or ("",))[0]
        if key is None or authenticator.has_known(key):
            return await authenticator.principal(key)
        self._throttle.check(address)
        try:
            return await authenticator.principal(key)
        except Unauthenticated:
            self._throttle.note_failure(address)
            raise

    def _handler(self, scope: Scope) -> Handler | None:
        """Return what handles a request here; None for what the application answers."""
        path: str = scope["path"]
        if scope["method"] != "POST":
            return None
        handler = HANDLERS.get(path)
        if handler is None and path.startswith(routes.PREFIX):
            is_served = any(route.matches(scope)[0] is Match.FULL for route in self._routed)
            handler = None if is_served else reject_unknown_call
        return handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            principal = await self._authenticate(scope)
        except WireError as error:
            _, send = drain_body(scope, receive, send, DISCARD_WITHOUT_KEY)
            # Whoever has no key keeps no connection.
            await respond_error(send, error, {"connection": "close"})
            return
        discard = DISCARD_WITHOUT_KEY if principal is None else DISCARD
        receive, send = drain_body(scope, receive, send, discard)
        handler = self._handler(scope)
        if handler is None or principal is None:
            await self._app(scope, receive, send)
            return
        call = Call(self._server(), HotRequest(scope, receive), send, principal)
        try:
            await handler(call)
        except WireError as error:
            await respond_error(send, error)
        except Exception:
            log.exception("request failed unexpectedly", path=call.request.path)
            if call.has_answered:
                raise
            await respond(send, _INTERNAL_ERROR, status=500)


async def forward_backward(call: Call) -> None:
    """Stream a protobuf body to the head of its model; JSON of old SDKs fails in its place."""
    check_content_encoding(call.request.headers, accepted=("zstd",))
    if call.request.headers.get("content-type", "").startswith(futures.JSON):
        await reject_in_sequence(call, InvalidRequest(OLD_SDK))
        return
    async with aclosing(call.request.chunks()) as chunks:
        prefix = await read_prefix(chunks, envelope.PREFIX_BYTES)
        encoding = call.request.headers.get("content-encoding", "identity")
        is_plain = encoding != "zstd"
        plain = prefix if is_plain else decompress_prefix(prefix, envelope.PREFIX_BYTES)
        model_id = envelope.peek_training(plain[: envelope.PREFIX_BYTES]).model_id
        endpoint = await head_for_run(call, model_id)
        await call.forward(endpoint, model_id, chain(prefix, chunks))


async def ordered(call: Call, body: bytes) -> None:
    """Forward a JSON request to the head of its model."""
    model_id = envelope.peek_json(body, "model_id")
    await call.forward(await head_for_run(call, model_id), model_id, body)


async def save_weights(call: Call, body: bytes) -> None:
    """Forward a save; note the checkpoint that it may make."""
    model_id = envelope.peek_json(body, "model_id")
    endpoint = await head_for_run(call, model_id)
    request = await _read_or_none(SaveWeightsRequest, body)
    if request is not None and request.model_id == model_id:
        path = _path_or_none(model_id, CheckpointKind.TRAINING, request.name())
        await _forward_save(call, endpoint, request, body, path)
        return
    await call.forward(endpoint, model_id, body)


async def save_weights_for_sampler(call: Call, body: bytes) -> None:
    """Forward a publication; note the checkpoint or the sampling session that it may make."""
    model_id = envelope.peek_json(body, "model_id")
    endpoint = await head_for_run(call, model_id)
    request = await _read_or_none(SaveWeightsForSamplerRequest, body)
    if request is not None and request.model_id == model_id:
        if request.path is not None:
            path = _path_or_none(model_id, CheckpointKind.SAMPLER, request.path)
            await _forward_save(call, endpoint, request, body, path)
            return
        if request.sampling_session_seq_id is not None:
            try:
                await _record_sampler(
                    call, ModelId.parse(model_id), request.sampling_session_seq_id
                )
            except InvalidRequest as error:
                await forward_rejection(call, sequence_position(request), error)
                return
    await call.forward(endpoint, model_id, body)


async def load_weights(call: Call, body: bytes) -> None:
    """Begin a run from a checkpoint, or forward a load into an existing model.

    Either way the checkpoint must be the caller's to read.
    """
    try:
        request = await _read(LoadWeightsRequest, body)
    except InvalidRequest as error:
        await forward_rejection(call, body, error)
        return
    if request.model_id is None:
        runs = call.server.training_runs
        request_id = await runs.create_from_checkpoint(request, call.principal)
        await respond(call.send, futures.promise(request_id))
        return
    try:
        await call.server.checkpoints.manifest(CheckpointPath.parse(request.path), call.principal)
    except (InvalidRequest, NotFound) as error:
        await forward_rejection(call, sequence_position(request), error)
        return
    await call.forward(await head_for_run(call, request.model_id), request.model_id, body)


def _in_order(handle: Callable[[Call, bytes], Awaitable[None]]) -> Handler:
    """Return what handles JSON requests that have a place in their model's order.

    One that is too long fails in its place, if its beginning names one.
    """

    async def handler(call: Call) -> None:
        try:
            body = await call.request.body(call.server.settings.limits.max_body_bytes)
        except BodyTooLarge as error:
            place = envelope.peek_json_place(call.request.beginning)
            await forward_rejection(call, place, error)
        else:
            await handle(call, body)

    return handler


async def asample(call: Call) -> None:
    """Forward a sampling request to a head that serves its session."""
    body = await call.request.body(call.server.settings.limits.max_body_bytes)
    sampler_id = envelope.peek_json(body, "sampling_session_id")
    locator = call.server.locator
    await locator.authorize_sampler(sampler_id, call.principal)
    if (run_id := await locator.run_of_sampler(sampler_id)) is not None:
        call.server.activity.touch(run_id)
    endpoint = await wait_for_head(
        locator.head_of_sampler(sampler_id), lambda: locator.sampler_pending(sampler_id)
    )
    await call.forward(endpoint, sampler_id, body)


async def cancel_future(call: Call) -> None:
    """Forward a cancellation; one that comes too late is fine."""
    body = await call.request.body(_SMALL_BODY_BYTES)
    request_id = RequestId.parse(parse_json(RetrieveFutureRequest, body).request_id)
    if not isinstance(request_id.target, SamplingSessionId):
        raise InvalidRequest("only sampling requests can be cancelled")
    target = str(request_id.target)
    await call.server.locator.authorize_sampler(target, call.principal)
    try:
        async with asyncio.timeout(_RETRY_SECONDS):
            endpoint = await call.server.locator.head_of_sample(target)
    except (WireError, TimeoutError):
        await respond(call.send, b"{}")
        return
    await call.forward(endpoint, target, body)


async def retrieve_future(call: Call) -> None:
    """Wait for a result where it lives; what is lost for good is answered, not retried."""
    body = await call.request.body(_SMALL_BODY_BYTES)
    name = parse_json(RetrieveFutureRequest, body).request_id
    if (model_id := unloading.unloaded_model(name)) is not None:
        await call.server.locator.authorize_run(model_id, call.principal)
        await respond(call.send, (await unloading.result_of(model_id, call.server)).body)
        return
    request_id = RequestId.parse(name)
    is_sample = isinstance(request_id.target, SamplingSessionId)
    retrieve = _retrieve_sample if is_sample else _retrieve_training
    try:
        with call.server.long_polls.waiting():
            try:
                await retrieve(call, request_id, body)
            except Unavailable as error:
                # The SDK asks again without any delay of its own.
                await asyncio.sleep(_RETRY_SECONDS)
                pending = futures.pending(str(request_id), reason=error.message)
                await respond(call.send, pending, status=futures.PENDING_STATUS)
    except ShuttingDown:
        # This server is stopping: the client asks again, the next one or another replica.
        if not call.has_answered:
            pending = futures.pending(str(request_id))
            await respond(call.send, pending, status=futures.PENDING_STATUS)


async def _retrieve_training(call: Call, request_id: RequestId, body: bytes) -> None:
    target, locator = str(request_id.target), call.server.locator
    await locator.authorize_run(target, call.principal)
    call.server.activity.touch(target)
    try:
        endpoint = await _in_a_poll(call, locator.head_of_run(target))
    except TimeoutError:
        await _answer_pending(call, request_id, locator.run_pending(target))
        return
    except WireError as error:
        await respond(call.send, futures.failed_with(error).body)
        return
    await call.forward(endpoint, target, body, silence_seconds=_poll_seconds(call))


async def _retrieve_sample(call: Call, request_id: RequestId, body: bytes) -> None:
    target, locator = str(request_id.target), call.server.locator
    await locator.authorize_sampler(target, call.principal)
    try:
        endpoint = await _in_a_poll(call, locator.head_of_sample(target))
    except TimeoutError:
        await _answer_pending(call, request_id, locator.sampler_pending(target))
        return
    except WireError as error:
        await respond(call.send, futures.failed_with(error).body)
        return
    # A head that does not know the request is not the one it was sent to: on 410 the SDK sends
    # the sample again.
    replace = {404: _GONE} if await locator.can_sample_again(target) else None
    await call.forward(endpoint, target, body, replace=replace, silence_seconds=_poll_seconds(call))


def _poll_seconds(call: Call) -> float:
    """Return how long a head may take to answer a poll."""
    return call.server.settings.timings.long_poll_seconds + _POLL_MARGIN_SECONDS


async def _in_a_poll(call: Call, head: Awaitable[HeadEndpoint]) -> HeadEndpoint:
    """Wait for a head as long as a long poll lasts.

    Raises:
        TimeoutError: it is not there yet, or could not be reached: the client is to ask again.
    """
    seconds = call.server.settings.timings.long_poll_seconds
    async with asyncio.timeout(seconds):
        try:
            return await head
        except Unavailable:
            # The SDK asks again without any delay of its own.
            await asyncio.sleep(min(seconds, _RETRY_SECONDS))
            raise TimeoutError from None


async def _answer_pending(call: Call, request_id: RequestId, waiting: Pending) -> None:
    body = futures.pending(str(request_id), waiting.queue_state, waiting.reason)
    await respond(call.send, body, status=futures.PENDING_STATUS)


async def _forward_save(
    call: Call,
    endpoint: HeadEndpoint,
    request: SaveWeightsRequest | SaveWeightsForSamplerRequest,
    body: bytes,
    path: CheckpointPath | None,
) -> None:
    """Forward a request to save a checkpoint at a path; None if the head is going to refuse it."""

    async def forward() -> int | None:
        await call.forward(endpoint, request.model_id, body)
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


async def _record_sampler(call: Call, model_id: ModelId, index: int) -> None:
    """Note the sampling session that a publication makes.

    Raises:
        InvalidRequest: its number was used for other weights.
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
        await call.server.locator.add_sampler(row)


def _path_or_none(run_id: str, kind: CheckpointKind, name: str) -> CheckpointPath | None:
    """Return a path, or None if the head is going to refuse it."""
    try:
        return CheckpointPath(run_id, kind, name)
    except InvalidRequest:
        return None


async def _read(model: type[RequestT], body: bytes) -> RequestT:
    """Read a request, a long one beside the event loop.

    Raises:
        InvalidRequest: it is none.
    """
    if len(body) > _SMALL_BODY_BYTES:
        return await asyncio.to_thread(parse_json, model, body)
    return parse_json(model, body)


async def _read_or_none(model: type[RequestT], body: bytes) -> RequestT | None:
    """Return a request, or None if the head is going to refuse it."""
    try:
        return await _read(model, body)
    except InvalidRequest:
        return None


HANDLERS: Mapping[str, Handler] = {
    routes.FORWARD_BACKWARD: forward_backward,
    routes.OPTIM_STEP: _in_order(ordered),
    routes.SAVE_WEIGHTS: _in_order(save_weights),
    routes.SAVE_WEIGHTS_FOR_SAMPLER: _in_order(save_weights_for_sampler),
    routes.SAVE_WEIGHTS_EXTERNAL: _in_order(ordered),
    routes.LOAD_WEIGHTS: _in_order(load_weights),
    routes.ASAMPLE: asample,
    routes.RETRIEVE_FUTURE: retrieve_future,
    routes.CANCEL_FUTURE: cancel_future,
}
