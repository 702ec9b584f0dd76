"""The hot paths: everything a head serves, forwarded as bytes.

Plain ASGI, without FastAPI: bodies are read only as far as needed to route them. Before anything
goes to a head, the key is checked, and that what the request is about belongs to its holder.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
import structlog
import zstandard
from starlette.types import ASGIApp

from tinkercloud_api.auth import Principal
from tinkercloud_api.catalog.tables import SamplingSession
from tinkercloud_api.context import Context
from tinkercloud_api.http import (
    HotRequest,
    Receive,
    Scope,
    Send,
    answer,
    answer_error,
    reading_to_the_end,
    refuse_encoding,
)
from tinkercloud_api.providers.base import HeadRoute, Waiting
from tinkercloud_api.proxy import StaleRoute
from tinkercloud_api.routes import unloading
from tinkercloud_api.waiters import Dismissed
from tinkercloud_protocol import envelope, futures, routes
from tinkercloud_protocol.errors import (
    BodyTooLarge,
    InvalidRequest,
    NotFound,
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

RequestT = TypeVar("RequestT", LoadWeightsRequest, SaveWeightsRequest, SaveWeightsForSamplerRequest)

_SMALL_BODY_BYTES = 1 << 20
_REFUSAL_CHARACTERS = 2000
"""Of a reason, which travels in a header: it may quote what was sent."""
_RETRY_SECONDS = 1.0
_HOLD_SECONDS = 45.0
"""How long a request waits for a head that is on its way: less than the SDK's own 60."""
_SILENCE_SECONDS = 60.0
"""Of a head that was sent all of a request: what takes long is a future, and the SDK waits no
longer."""
_POLL_MARGIN_SECONDS = 20.0
"""Of a head after a long poll's end: the SDK itself waits 25 s more than polls last by default."""
_INTERNAL_ERROR = b'{"detail": "internal error; the log of the server has the details"}'
_GONE = (410, orjson.dumps({"detail": "this result is gone; send the request again"}))


@dataclass(slots=True)
class Call:
    """One request and what is known of it."""

    server: Context
    request: HotRequest
    raw_send: Send
    principal: Principal = field(init=False)
    """Who is asking, once that is known."""
    has_answered: bool = False
    """Whether any part of an answer has been sent."""

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the answer (ASGI)."""
        self.has_answered = True
        await self.raw_send(message)

    async def forward(
        self,
        route: HeadRoute,
        target: str,
        body: bytes | AsyncIterator[bytes],
        *,
        replace: Mapping[int, tuple[int, bytes]] | None = None,
        refusal: str | None = None,
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        """Forward to a head, as `Proxy.forward` does."""
        try:
            await self.server.proxy.forward(
                self.send,
                route,
                self.request.path,
                target=target,
                headers=self.request.headers,
                body=body,
                replace=replace,
                refusal=refusal,
                silence_seconds=silence_seconds,
            )
        except StaleRoute:
            self.server.provider.mistrust(route)
            raise


Handler = Callable[[Call], Awaitable[None]]


class HotPaths:
    """ASGI middleware, the outermost: serves the hot paths, hands everything else on.

    Nothing but a dictionary look-up stands between the server and these handlers: the framework's
    own routing costs more than all that they do.
    """

    def __init__(self, app: ASGIApp, server: Callable[[], Context]) -> None:
        """Wrap an application.

        Args:
            app: serves every other path.
            server: returns the server's parts, which exist once it runs.
        """
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] == "http":
            receive, send = reading_to_the_end(scope, receive, send)
        handler = HANDLERS.get(scope["path"]) if scope["type"] == "http" else None
        if handler is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        call = Call(self._server(), HotRequest(scope, receive), send)
        try:
            key = call.request.headers.get(routes.API_KEY_HEADER)
            call.principal = await call.server.authenticator.principal(key)
            await handler(call)
        except WireError as error:
            await answer_error(send, error)
        except Exception:
            log.exception("request failed unexpectedly", path=call.request.path)
            if call.has_answered:
                raise
            await answer(send, _INTERNAL_ERROR, status=500)


async def forward_backward(call: Call) -> None:
    """Stream a protobuf body to the head of its model."""
    refuse_encoding(call.request.headers, accepted=("zstd",))
    async with aclosing(call.request.chunks()) as chunks:
        prefix = await _prefix(chunks)
        encoding = call.request.headers.get("content-encoding", "identity")
        plain = _decompressed_prefix(prefix) if encoding == "zstd" else prefix
        model_id = envelope.peek_training(plain[: envelope.PREFIX_BYTES]).model_id
        route = await _route_run(call, model_id)
        await call.forward(route, model_id, _chain(prefix, chunks))


async def ordered(call: Call, body: bytes) -> None:
    """Forward a JSON request to the head of its model."""
    model_id = envelope.peek_json(body, "model_id")
    await call.forward(await _route_run(call, model_id), model_id, body)


async def save_weights(call: Call, body: bytes) -> None:
    """Forward a save; note the checkpoint that it may make."""
    model_id = envelope.peek_json(body, "model_id")
    route = await _route_run(call, model_id)
    request = await _read_or_none(SaveWeightsRequest, body)
    if request is not None and request.model_id == model_id:
        path = _path_or_none(model_id, CheckpointKind.TRAINING, request.name())
        await _expect(call, path)
    await call.forward(route, model_id, body)


async def save_weights_for_sampler(call: Call, body: bytes) -> None:
    """Forward a publication; note the checkpoint or the sampling session that it may make."""
    model_id = envelope.peek_json(body, "model_id")
    route = await _route_run(call, model_id)
    request = await _read_or_none(SaveWeightsForSamplerRequest, body)
    if request is not None and request.model_id == model_id:
        if request.path is not None:
            await _expect(call, _path_or_none(model_id, CheckpointKind.SAMPLER, request.path))
        elif request.sampling_session_seq_id is not None:
            try:
                await _expect_sampler(
                    call, ModelId.parse(model_id), request.sampling_session_seq_id
                )
            except InvalidRequest as error:
                await _forward_refused(call, _place(request), error)
                return
    await call.forward(route, model_id, body)


async def load_weights(call: Call, body: bytes) -> None:
    """Begin a run from a checkpoint, or forward a load into an existing model.

    Either way the checkpoint must be the caller's to read.
    """
    try:
        request = await _read(LoadWeightsRequest, body)
    except InvalidRequest as error:
        await _forward_refused(call, body, error)
        return
    if request.model_id is None:
        runs = call.server.training_runs
        request_id = await runs.create_from_checkpoint(request, call.principal)
        await answer(call.send, futures.promise(request_id))
        return
    try:
        await call.server.checkpoints.manifest(CheckpointPath.parse(request.path), call.principal)
    except (InvalidRequest, NotFound) as error:
        await _forward_refused(call, _place(request), error)
        return
    await call.forward(await _route_run(call, request.model_id), request.model_id, body)


def _in_order(handle: Callable[[Call, bytes], Awaitable[None]]) -> Handler:
    """Return what handles JSON requests that have a place in their model's order.

    One that is too long fails in its place, if its beginning names one.
    """

    async def handler(call: Call) -> None:
        try:
            body = await call.request.body(call.server.settings.limits.max_body_bytes)
        except BodyTooLarge as error:
            place = envelope.peek_json_place(call.request.beginning)
            await _forward_refused(call, place, error)
        else:
            await handle(call, body)

    return handler


async def _forward_refused(call: Call, body: bytes, error: WireError) -> None:
    """Let a request that is refused take its place in its model's order, and fail there.

    An answer with a status would leave a hole in the order, for which all that follows would wait.

    Raises:
        WireError: the one given; the request names no model.
    """
    try:
        model_id = envelope.peek_json(body, "model_id")
    except InvalidRequest:
        raise error from None
    route = await _route_run(call, model_id)
    await call.forward(route, model_id, body, refusal=error.message[:_REFUSAL_CHARACTERS])


def _place(request: RequestT) -> bytes:
    """Return a body that names a request's place in its model's order, and nothing else.

    A head that is older than refusals would do what it is told, whoever may ask for it: it is not
    told.
    """
    return request.model_dump_json(include={"model_id", "seq_id"}).encode()


async def asample(call: Call) -> None:
    """Forward a sampling request to a head that serves its session."""
    body = await call.request.body(call.server.settings.limits.max_body_bytes)
    sampler_id = envelope.peek_json(body, "sampling_session_id")
    router = call.server.router
    await router.authorize_sampler(sampler_id, call.principal)
    if (run_id := await router.run_of_sampler(sampler_id)) is not None:
        call.server.activity.touch(run_id)
    route = await _held(
        router.head_of_sampler(sampler_id), lambda: router.why_sampler_waits(sampler_id)
    )
    await call.forward(route, sampler_id, body)


async def cancel_future(call: Call) -> None:
    """Forward a cancellation; one that comes too late is fine."""
    body = await call.request.body(_SMALL_BODY_BYTES)
    request_id = RequestId.parse(parse_json(RetrieveFutureRequest, body).request_id)
    if not isinstance(request_id.target, SamplingSessionId):
        raise InvalidRequest("only sampling requests can be cancelled")
    target = str(request_id.target)
    await call.server.router.authorize_sampler(target, call.principal)
    try:
        async with asyncio.timeout(_RETRY_SECONDS):
            route = await call.server.router.head_of_sample(target)
    except (WireError, TimeoutError):
        await answer(call.send, b"{}")
        return
    await call.forward(route, target, body)


async def retrieve_future(call: Call) -> None:
    """Wait for a result where it lives; what is lost for good is answered, not retried."""
    body = await call.request.body(_SMALL_BODY_BYTES)
    name = parse_json(RetrieveFutureRequest, body).request_id
    if (model_id := unloading.unloaded_model(name)) is not None:
        await call.server.router.authorize_run(model_id, call.principal)
        await answer(call.send, (await unloading.result_of(model_id, call.server)).body)
        return
    request_id = RequestId.parse(name)
    is_sample = isinstance(request_id.target, SamplingSessionId)
    retrieve = _retrieve_sample if is_sample else _retrieve_training
    try:
        with call.server.waiters.waiting():
            try:
                await retrieve(call, request_id, body)
            except Unavailable as error:
                # The SDK asks again without any delay of its own.
                await asyncio.sleep(_RETRY_SECONDS)
                pending = futures.pending(str(request_id), reason=error.message)
                await answer(call.send, pending, status=futures.PENDING_STATUS)
    except Dismissed:
        # This server is stopping: the client asks again, the next one or another replica.
        if not call.has_answered:
            pending = futures.pending(str(request_id))
            await answer(call.send, pending, status=futures.PENDING_STATUS)


async def _retrieve_training(call: Call, request_id: RequestId, body: bytes) -> None:
    target, router = str(request_id.target), call.server.router
    await router.authorize_run(target, call.principal)
    call.server.activity.touch(target)
    try:
        route = await _in_a_poll(call, router.head_of_run(target))
    except TimeoutError:
        await _answer_pending(call, request_id, router.why_waiting(target))
        return
    except WireError as error:
        await answer(call.send, futures.failed_with(error).body)
        return
    await call.forward(route, target, body, silence_seconds=_poll_seconds(call))


async def _retrieve_sample(call: Call, request_id: RequestId, body: bytes) -> None:
    target, router = str(request_id.target), call.server.router
    await router.authorize_sampler(target, call.principal)
    try:
        route = await _in_a_poll(call, router.head_of_sample(target))
    except TimeoutError:
        await _answer_pending(call, request_id, router.why_sampler_waits(target))
        return
    except WireError as error:
        await answer(call.send, futures.failed_with(error).body)
        return
    # A head that does not know the request is not the one it was sent to: on 410 the SDK sends
    # the sample again.
    replace = {404: _GONE} if await router.can_sample_again(target) else None
    await call.forward(route, target, body, replace=replace, silence_seconds=_poll_seconds(call))


def _poll_seconds(call: Call) -> float:
    """Return how long a head may take to answer a poll."""
    return call.server.settings.timings.long_poll_seconds + _POLL_MARGIN_SECONDS


async def _in_a_poll(call: Call, head: Awaitable[HeadRoute]) -> HeadRoute:
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


async def _answer_pending(call: Call, request_id: RequestId, waiting: Waiting) -> None:
    body = futures.pending(str(request_id), waiting.queue_state, waiting.reason)
    await answer(call.send, body, status=futures.PENDING_STATUS)


async def _route_run(call: Call, model_id: str) -> HeadRoute:
    await call.server.router.authorize_run(model_id, call.principal)
    call.server.activity.touch(model_id)
    router = call.server.router
    return await _held(router.head_of_run(model_id), lambda: router.why_waiting(model_id))


async def _held(head: Awaitable[HeadRoute], why: Callable[[], Waiting]) -> HeadRoute:
    """Wait for a head as long as a client waits for an answer.

    Raises:
        Unavailable: it is not there yet; the message says why.
    """
    try:
        async with asyncio.timeout(_HOLD_SECONDS):
            return await head
    except TimeoutError:
        raise Unavailable(why().reason) from None


async def _expect(call: Call, path: CheckpointPath | None) -> None:
    if path is not None:
        await call.server.checkpoints.expect(path, call.principal.owner)


async def _expect_sampler(call: Call, model_id: ModelId, index: int) -> None:
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
        await call.server.router.begin_sampler(row)


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


async def _prefix(chunks: AsyncIterator[bytes]) -> bytes:
    """Read until the beginning of the body can be routed by."""
    prefix = b""
    async for chunk in chunks:
        prefix += chunk
        if len(prefix) >= envelope.PREFIX_BYTES:
            break
    return prefix


def _decompressed_prefix(prefix: bytes) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(prefix)) as reader:
            return reader.read(envelope.PREFIX_BYTES)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"body is not valid zstd: {error}") from None


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk


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
