"""The head's HTTP API: one route table, plain ASGI.

A request whose model and number can be parsed takes its place in that model's order, whatever else
is wrong with it, and its future reports the error. Rejecting it outright would leave a gap in the
order: the SDK sends the chunks of a batch in parallel and the first one last, and never sends the
first if another chunk was rejected. A request without a number (`unnumbered`) leaves no gap, so it
is rejected outright.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TypeVar
from urllib.parse import unquote

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tinkercloud_protocol.heads.engine_scaling_settings import Engines
from tinkercloud_protocol.heads.head_messages import (
    ForgetResults,
    Forgotten,
    ModelSaved,
    ModelSuspended,
    RecordedSessionsOf,
    SampledRuns,
    SaveModel,
)
from tinkercloud_protocol.heads.launch import (
    Limits,
    ModelSpec,
    SamplerSpec,
    Saved,
)
from tinkercloud_protocol.heads.owner_limits import OwnerLimits
from tinkercloud_protocol.requests.sampling_requests import (
    CancelFutureRequest,
    NamedWeights,
    RetrieveFutureRequest,
    SampleRequest,
    parse_sample,
)
from tinkercloud_protocol.requests.training_requests import AttachModelAnswer, AttachModelRequest
from tinkercloud_protocol.responses import chat_errors
from tinkercloud_protocol.responses.json_results import forward_backward_as_json, sample_as_json
from tinkercloud_protocol.wire import (
    envelope,
    future_responses,
    request_ids,
    routes,
)
from tinkercloud_protocol.wire.asgi import Receive, Scope, Send
from tinkercloud_protocol.wire.errors import (
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Unauthenticated,
    WireError,
)
from tinkercloud_protocol.wire.ids import ModelId, RequestId, SamplingSessionId
from tinkercloud_protocol.wire.json_model import parse_json
from tinkercloud_worker.head.order import requests
from tinkercloud_worker.head.order.unnumbered import Arrivals
from tinkercloud_worker.head.serve.chat_endpoints import OPERATIONS, HeadChat, Operation
from tinkercloud_worker.head.serve.lifecycle import Lifecycle
from tinkercloud_worker.head.serve.retrieval import Poll
from tinkercloud_worker.head.serve.service import HeadService
from tinkercloud_worker.head.wire.body_limiter import BodyLimiter
from tinkercloud_worker.head.wire.head_http import (
    LARGE_BODY_BYTES,
    Request,
    Response,
    Stream,
    error_response,
)
from tinkercloud_worker.head.wire.head_token import HeadToken

log = structlog.get_logger(__name__)

T = TypeVar("T")


class WrongGeneration(WireError):
    """The request was meant for an earlier head at this address."""

    status = routes.WRONG_GENERATION_STATUS


class HeadApp:
    """The ASGI application. It serves health checks at once, the rest when the engine is ready."""

    def __init__(
        self, lifecycle: Lifecycle, limits: Limits, token: HeadToken, generation: str
    ) -> None:
        self._lifecycle = lifecycle
        self._limits = limits
        self._token = token
        self._generation = generation
        self._arrivals = Arrivals()
        self._chat = HeadChat()
        self._body_limiter = BodyLimiter(limits.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event (the ASGI entry point)."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        request = Request(scope, receive)
        names = {
            request_ids.LOG_FIELD: request.headers.get(request_ids.HEADER),
            request_ids.TRACE_LOG_FIELD: request.headers.get(request_ids.TRACE_HEADER),
        }
        named = {field: name for field, name in names.items() if name}
        with structlog.contextvars.bound_contextvars(**named):
            await self._serve(request, send)

    async def _serve(self, request: Request, send: Send) -> None:
        try:
            response = await self._respond(request)
        except WireError as error:
            response = _error_response(request.path, error)
        except Exception:
            log.exception("unexpected error in a request handler", path=request.path)
            response = Response(b'{"detail": "internal error in the session head"}', 500)
        await response.send(send)

    async def _respond(self, request: Request) -> Response | Stream:
        route = _BY_ROUTE.get((request.method, request.path))
        if route is None:
            route = _BY_ROUTE.get((request.method, _pattern_of(request)))
        if request.method == "POST" and routes.REFUSAL_HEADER in request.headers:
            route = _REFUSED
        if route is None or route.needs_token:
            self._authenticate(request)
        if route is None:
            paths = {request.path, _pattern_of(request)}
            if allowed := {each.method for each in ROUTES if each.path in paths}:
                raise MethodNotAllowed(request.method, request.path, allowed)
            raise NotFound(f"a session head does not serve {request.method} {request.path}")
        request.max_bytes = route.limit.max_bytes(self._limits)
        return await route.handler(self, request)

    def _authenticate(self, request: Request) -> None:
        """Check the token of a request, and apply the limits of its owner that it carries."""
        if not self._token.is_carried_by(request.headers.get(routes.HEAD_TOKEN_HEADER, "")):
            raise Unauthenticated(f"header {routes.HEAD_TOKEN_HEADER} is missing or wrong")
        intended = request.headers.get(routes.GENERATION_HEADER, self._generation)
        if intended != self._generation:
            raise WrongGeneration(
                f"{routes.GENERATION_HEADER}: this is head {self._generation!r}, not {intended!r}"
            )
        if (limits := request.headers.get(routes.OWNER_LIMITS_HEADER)) is not None:
            self._lifecycle.set_owner_limits(OwnerLimits.model_validate_json(unquote(limits)))

    @property
    def _service(self) -> HeadService:
        return self._lifecycle.service

    async def _health(self, _request: Request) -> Response:
        self._lifecycle.check_alive()
        return Response(b'{"status": "ok"}')

    async def _ready(self, _request: Request) -> Response:
        self._lifecycle.check_ready()
        return Response(b'{"status": "ready"}')

    async def _wait_ready(self, _request: Request) -> Response:
        await self._lifecycle.wait_until_ready()
        return Response(b'{"status": "ready"}')

    async def _status(self, _request: Request) -> Response:
        return Response(self._service.status().model_dump_json().encode())

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(), content_type=CONTENT_TYPE_LATEST)

    @asynccontextmanager
    async def _received(self, request: Request) -> AsyncIterator[bytes]:
        """Receive a body; the caller parses it within the context.

        A large body waits until its owner has room, since the parsed request is many times as
        large.

        Raises:
            BodyTooLarge: it exceeds the limit.
            InvalidRequest: it is incomplete, or can't be decompressed.
        """
        size = request.body_bytes()
        if size < LARGE_BODY_BYTES:
            yield await request.body()
            return
        target = request.headers.get(routes.TARGET_HEADER, "")
        async with self._body_limiter.reserve(self._service.owner_of(target), size):
            yield await request.body()

    async def _forward_backward(self, request: Request) -> Response:
        if future_responses.is_json(request.headers.get("content-type", "")):
            return await self._json_batch(request, requests.JSON_FORWARD_BACKWARD)
        try:
            async with self._received(request) as body:
                place = envelope.peek_training(body[: envelope.PREFIX_BYTES])
                self._check_target(request, place.model_id)
                if place.seq_id < 0:
                    raise InvalidRequest(
                        f"seq_id: must be 1 or more, or absent, got {place.seq_id}"
                    )
                async with self._turn_of(place):
                    # In a thread even if the body is small: a sparse tensor expands to any size.
                    received = await asyncio.to_thread(requests.receive_batch, body, place)
                    return await self._submit(request, received)
        except BodyTooLarge as error:
            await self._queue_rejection(request, error)
            raise

    @asynccontextmanager
    async def _turn_of(self, place: envelope.TrainingEnvelope) -> AsyncIterator[None]:
        """Wait for the requests that arrived earlier, unless the request has a number."""
        if place.seq_id > 0:
            yield
            return
        async with self._arrivals.turn(place.model_id):
            yield

    async def _forward(self, request: Request) -> Response:
        return await self._json_batch(request, routes.FORWARD)

    async def _json_batch(self, request: Request, path: str) -> Response:
        parse = partial(requests.receive_json_batch, path)
        async with self._received(request) as body, self._routed_turn(request):
            return await self._submit(request, await asyncio.to_thread(parse, body))

    def _routed_turn(self, request: Request) -> AbstractAsyncContextManager[None]:
        """Wait for the requests in JSON that arrived earlier: any of them may have no number."""
        return self._arrivals.turn(request.headers.get(routes.TARGET_HEADER, ""))

    async def _submit(self, request: Request, received: requests.Received) -> Response:
        self._check_target(request, received.place.model_id)
        key = None if received.is_numbered else request.idempotency_key
        await self._service.recall(received.place.model_id)
        request_id = self._service.submit(received, key)
        await self._service.accepted(received.place.model_id)
        return Response(future_responses.promise(request_id, model_id=received.place.model_id))

    async def _queue_rejection(self, request: Request, error: BodyTooLarge) -> None:
        """Queue the rejection of an oversized body, if its prefix names a model and a number."""
        prefix = request.plain_prefix(envelope.PREFIX_BYTES)
        try:
            place = envelope.peek_training(prefix)
            self._check_target(request, place.model_id)
            if place.seq_id >= 1:
                refused = requests.receive_unread(request.path, prefix, place, error)
                await self._service.recall(place.model_id)
                self._service.results.mark_read(self._service.submit(refused))
        except WireError:
            log.info("an oversized body names no model and number; nothing is queued")

    async def _ordered(self, request: Request) -> Response:
        parse = partial(requests.receive_json, request.path)
        async with self._received(request) as body, self._routed_turn(request):
            return await self._submit(request, await _off_loop(parse, body))

    async def _refused(self, request: Request) -> Response:
        """Queue a request that the API server has rejected, on any path."""
        reason = InvalidRequest(unquote(request.headers[routes.REFUSAL_HEADER]))
        parse = partial(requests.receive_refused, request.path, error=reason)
        async with self._received(request) as body:
            return await self._submit(request, await _off_loop(parse, body))

    async def _attach_model(self, request: Request) -> Response:
        model_id = parse_json(AttachModelRequest, await request.body()).model_id
        self._check_target(request, model_id)
        await self._service.recall(model_id)
        next_seq_id = await self._service.attach_model(model_id)
        step = self._service.step_of(model_id)
        answer = AttachModelAnswer(model_id=model_id, next_seq_id=next_seq_id, step=step)
        return Response(answer.model_dump_json().encode())

    async def _asample(self, request: Request) -> Response:
        async with self._received(request) as body:
            parsed = await _off_loop(parse_sample, body)
            if not parsed.sampling_session_id:
                parsed = await _off_loop(lambda body: _with_session(parsed, body, request), body)
            if not parsed.is_numbered:
                parsed = requests.named_sample(parsed, request.idempotency_key)
            session = parsed.sampling_session_id
            self._check_target(request, session)
            # Decoded images are large: they must not wait for a model that is resumed.
            await self._service.recall(session)
            # In a thread even if the body is small: a sparse tensor of targets expands.
            work, prepare = self._lifecycle.backend.image_work, self._service.samples.prepare
            prepared = await work.run(parsed.prompt.num_images, partial(prepare, parsed))
        # It may have been suspended meanwhile.
        await self._service.recall(session)
        request_id = self._service.sample(prepared)
        sequence_ids = request_id.sequence_ids(parsed.num_samples)
        return Response(future_responses.sample_promise(str(request_id), sequence_ids))

    async def _retrieve_future(self, request: Request) -> Response:
        body = await request.body()
        asked = parse_json(RetrieveFutureRequest, body)
        request_id = asked.request_id
        self._check_target(request, request_id.rpartition(":")[0])
        poll = Poll(
            request.seconds_to_wait,
            future_responses.INLINE_BYTES if asked.allow_metadata_only else None,
            counts_as_read=not request.is_peek,
        )
        result = await self._service.retrieve(request_id, poll)
        if result is None:
            pending = future_responses.pending(request_id, *self._service.why_waiting(request_id))
            return Response(pending, future_responses.PENDING_STATUS)
        if (
            result.content_type == future_responses.PROTOBUF
            and not future_responses.accepts_protobuf(request.headers.get("accept"))
        ):
            is_sample = isinstance(RequestId.parse(request_id).target, SamplingSessionId)
            convert = sample_as_json if is_sample else forward_backward_as_json
            return Response(await _off_loop(convert, result.body))
        return Response(result.body, content_type=result.content_type)

    async def _cancel_future(self, request: Request) -> Response:
        request_id = parse_json(CancelFutureRequest, await request.body()).request_id
        self._check_target(request, request_id.rpartition(":")[0])
        self._service.samples.cancel(request_id)
        return Response()

    async def _suspend(self, request: Request) -> Response:
        await self._service.suspend()
        return await self._status(request)

    async def _suspend_model(self, request: Request) -> Response:
        is_suspended = await self._service.suspend_model(ModelId.parse(_resource(request)))
        return Response(ModelSuspended(is_suspended=is_suspended).model_dump_json().encode())

    async def _save_model(self, request: Request) -> Response:
        asked = parse_json(SaveModel, await request.body())
        model_id = _resource(request)
        await self._service.recall(model_id)
        written = await self._service.save_model(model_id, asked.name)
        saved = ModelSaved(tinker_path=written.tinker_path, step=written.step)
        return Response(saved.model_dump_json().encode())

    async def _move_model(self, request: Request) -> Response:
        is_back = request.method == "DELETE"
        await self._service.move_model(ModelId.parse(_resource(request)), is_back=is_back)
        return Response()

    async def _engines(self, request: Request) -> Response:
        existing = parse_json(Engines, await request.body())
        needed = await self._lifecycle.needed_engines(existing.engines)
        return Response(Engines(engines=needed).model_dump_json().encode())

    async def _models(self, _request: Request) -> Response:
        return Response(self._lifecycle.held_models().model_dump_json().encode())

    async def _timeline(self, request: Request) -> Response:
        timeline = self._service.timeline(_resource(request))
        return Response(await asyncio.to_thread(lambda: timeline.model_dump_json().encode()))

    async def _checkpoint(self, request: Request) -> Response:
        only = _resource(request)
        if only:
            # Its state may be in the store, from which no checkpoint is made.
            await self._service.recall(only)
        saved = Saved(checkpoints=await self._service.checkpoint(only=only))
        return Response(saved.model_dump_json().encode())

    async def _put_model(self, request: Request) -> Response:
        spec = parse_json(ModelSpec, await request.body())
        model_id = ModelId.parse(_resource(request))
        return Response(future_responses.promise(await self._service.create_model(model_id, spec)))

    async def _delete_model(self, request: Request) -> Response:
        await self._service.delete_model(ModelId.parse(_resource(request)))
        return Response()

    async def _recorded_sessions(self, request: Request) -> Response:
        owner = parse_json(RecordedSessionsOf, await request.body()).owner
        return Response(self._chat.sessions_of(owner).model_dump_json().encode())

    async def _forget_results(self, request: Request) -> Response:
        which = parse_json(ForgetResults, await request.body())
        num_results = self._service.results.forget_read(which.owner, which.min_age_seconds)
        return Response(Forgotten(num_results=num_results).model_dump_json().encode())

    async def _put_sampled_runs(self, request: Request) -> Response:
        sampled = parse_json(SampledRuns, await request.body())
        self._lifecycle.backend.kept_samples.keep(sampled.runs)
        return Response()

    async def _put_sampler(self, request: Request) -> Response:
        spec = parse_json(SamplerSpec, await request.body())
        self._service.register_sampler(SamplingSessionId.parse(_resource(request)), spec)
        return Response()

    async def _delete_sampler(self, request: Request) -> Response:
        await self._service.retire_sampler(SamplingSessionId.parse(_resource(request)))
        return Response()

    def _check_target(self, request: Request, target: str) -> None:
        """Check that the body has the id by which the API server routed and authorized it."""
        routed = request.headers.get(routes.TARGET_HEADER)
        if routed != target:
            raise InvalidRequest(
                f"the body is for {target!r}, but the request was routed to {routed!r}: send each"
                " id once"
            )

    async def _answer_chat(self, operation: Operation, request: Request) -> Stream:
        service, backend = self._service, self._lifecycle.backend
        return Stream(partial(self._chat.serve, operation, request, service, backend))

    async def _lease(self, request: Request) -> Stream:
        """Report usage for as long as the API server at the other end is alive."""
        return Stream(partial(self._hold_lease, request))

    async def _hold_lease(self, request: Request, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        with self._lifecycle.held_lease():
            gone = asyncio.create_task(request.wait_until_disconnected())
            reporting = asyncio.create_task(self._report(send))
            await asyncio.wait({gone, reporting}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
        await send({"type": "http.response.body", "body": b""})

    async def _report(self, send: Send) -> None:
        async for line in self._lifecycle.lease_reports():
            await send({"type": "http.response.body", "body": line, "more_body": True})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._lifecycle.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._lifecycle.stop()
        await send({"type": "lifespan.shutdown.complete"})


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The largest body of a request."""

    name: str
    """In the printed table."""
    max_bytes: Callable[[Limits], int]


_BATCH = BodyLimit("limits.max_body_bytes", lambda limits: limits.max_body_bytes)
_SMALL = BodyLimit("64 KiB", lambda _: LARGE_BODY_BYTES)
_CONVERSATION = BodyLimit("16 MiB", lambda _: routes.MAX_CHAT_BODY_BYTES)


@dataclass(frozen=True, slots=True)
class HeadRoute:
    """A route of a head."""

    method: str
    path: str
    """`{id}` in it stands for a name without a slash."""
    limit: BodyLimit
    handler: Callable[[HeadApp, Request], Awaitable[Response | Stream]]
    needs_token: bool = True
    """Whether only API servers may call it. Kubelet and Prometheus have no token."""

    @property
    def name(self) -> str:
        """Name of the handler."""
        return self.handler.__qualname__


def _chat_route(method: str, path: str, operation: Operation) -> HeadRoute:
    @wraps(operation)
    async def answer(app: HeadApp, request: Request) -> Stream:
        return await app._answer_chat(operation, request)

    return HeadRoute(method, path, _CONVERSATION, answer)


ROUTES: tuple[HeadRoute, ...] = (
    HeadRoute("GET", routes.HEAD_HEALTH, _SMALL, HeadApp._health, needs_token=False),
    HeadRoute("GET", routes.HEAD_READY, _SMALL, HeadApp._ready, needs_token=False),
    HeadRoute("GET", routes.HEAD_METRICS, _SMALL, HeadApp._metrics, needs_token=False),
    HeadRoute("GET", routes.HEAD_WAIT_READY, _SMALL, HeadApp._wait_ready),
    HeadRoute("GET", routes.HEAD_STATUS, _SMALL, HeadApp._status),
    HeadRoute("GET", routes.HEAD_LEASE, _SMALL, HeadApp._lease),
    HeadRoute("POST", routes.FORWARD_BACKWARD, _BATCH, HeadApp._forward_backward),
    HeadRoute("POST", routes.FORWARD, _BATCH, HeadApp._forward),
    *(HeadRoute("POST", path, _BATCH, HeadApp._ordered) for path in requests.JSON_REQUESTS),
    HeadRoute("POST", routes.ATTACH_MODEL, _SMALL, HeadApp._attach_model),
    HeadRoute("POST", routes.ASAMPLE, _BATCH, HeadApp._asample),
    HeadRoute("POST", routes.RETRIEVE_FUTURE, _SMALL, HeadApp._retrieve_future),
    HeadRoute("POST", routes.CANCEL_FUTURE, _SMALL, HeadApp._cancel_future),
    HeadRoute("POST", routes.HEAD_SUSPEND, _SMALL, HeadApp._suspend),
    HeadRoute("POST", routes.HEAD_CHECKPOINT, _SMALL, HeadApp._checkpoint),
    HeadRoute("POST", f"{routes.HEAD_CHECKPOINT}/{{id}}", _SMALL, HeadApp._checkpoint),
    HeadRoute("POST", f"{routes.HEAD_SUSPEND_MODEL}/{{id}}", _SMALL, HeadApp._suspend_model),
    HeadRoute("POST", f"{routes.HEAD_SAVE_MODEL}/{{id}}", _SMALL, HeadApp._save_model),
    HeadRoute("POST", f"{routes.HEAD_MOVE_MODEL}/{{id}}", _SMALL, HeadApp._move_model),
    HeadRoute("DELETE", f"{routes.HEAD_MOVE_MODEL}/{{id}}", _SMALL, HeadApp._move_model),
    HeadRoute("POST", routes.HEAD_ENGINES, _BATCH, HeadApp._engines),
    HeadRoute("GET", routes.HEAD_MODELS, _SMALL, HeadApp._models),
    HeadRoute("PUT", f"{routes.HEAD_MODELS}/{{id}}", _SMALL, HeadApp._put_model),
    HeadRoute("DELETE", f"{routes.HEAD_MODELS}/{{id}}", _SMALL, HeadApp._delete_model),
    HeadRoute("GET", f"{routes.HEAD_TIMELINE}/{{id}}", _SMALL, HeadApp._timeline),
    HeadRoute("POST", routes.HEAD_FORGET_RESULTS, _SMALL, HeadApp._forget_results),
    HeadRoute("POST", routes.HEAD_RECORDED, _SMALL, HeadApp._recorded_sessions),
    HeadRoute("PUT", routes.HEAD_SAMPLED_RUNS, _BATCH, HeadApp._put_sampled_runs),
    HeadRoute("PUT", f"{routes.HEAD_SAMPLERS}/{{id}}", _SMALL, HeadApp._put_sampler),
    HeadRoute("DELETE", f"{routes.HEAD_SAMPLERS}/{{id}}", _SMALL, HeadApp._delete_sampler),
    *(_chat_route(*each) for each in OPERATIONS),
)
"""All routes of a head; `make routes` prints them."""
_BY_ROUTE = {(route.method, route.path): route for route in ROUTES}
_REFUSED = HeadRoute("POST", "*", _BATCH, HeadApp._refused)
"""Any path, with the header that says why the API server rejects the request."""


def _pattern_of(request: Request) -> str:
    """Return the pattern of a path that names something."""
    if request.recorded is not None:
        return f"{routes.OPENAI_SESSIONS}/{{id}}/{request.recorded.action}"
    return f"/{request.path.split('/', 2)[1]}/{{id}}"


def _error_response(path: str, error: WireError) -> Response:
    """Return the answer that an error becomes, in the shape that callers of the path expect."""
    if path.startswith(chat_errors.PREFIXES):
        return Response(chat_errors.error_bytes(path, error), error.status)
    return error_response(error)


def _with_session(sample: SampleRequest, body: bytes, request: Request) -> SampleRequest:
    """Return a request with the sampling session that the API server found for its weights.

    Raises:
        InvalidRequest: the API server has read other weights in the body, or none.
    """
    named, found = NamedWeights.named_in(body), request.headers.get(routes.WEIGHTS_HEADER)
    if named.as_header() != found:
        raise InvalidRequest(
            "model_id, model_path, base_model: the body contains different values; send each field"
            " once, and not within another one"
        )
    session = request.headers[routes.TARGET_HEADER]
    return sample.model_copy(update={"sampling_session_id": session})


def _resource(request: Request) -> str:
    return request.path.split("/", 2)[2] if request.path.count("/") >= 2 else ""


async def _off_loop(function: Callable[[bytes], T], body: bytes) -> T:
    """Run a parser on the event loop if the body is small, else in a thread."""
    if len(body) < LARGE_BODY_BYTES:
        return function(body)
    return await asyncio.to_thread(function, body)
