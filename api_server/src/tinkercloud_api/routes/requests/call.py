"""One request on a hot path, and how it reaches its session head."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.checkpoints.deferred_requests import Deferred
from tinkercloud_api.context import Context
from tinkercloud_api.heads.proxy import FORWARDED_HEADERS, StaleEndpoint
from tinkercloud_api.providers.base import HeadEndpoint, Pending
from tinkercloud_api.web.asgi_http import HotRequest
from tinkercloud_api.web.long_polls import ShuttingDown
from tinkercloud_protocol.requests.sampling_requests import MAX_SAMPLES
from tinkercloud_protocol.wire import envelope, future_responses
from tinkercloud_protocol.wire.asgi import Message, Send, decompress, respond
from tinkercloud_protocol.wire.errors import BodyTooLarge, InvalidRequest, Unavailable, WireError
from tinkercloud_protocol.wire.future_responses import JSON
from tinkercloud_protocol.wire.ids import RequestId, SamplingSessionId
from tinkercloud_protocol.wire.recorded_paths import RecordedPath

SMALL_BODY_BYTES = 1 << 20
"""Limit of bodies that name a request, and of what is parsed on the event loop."""
_WAIT_SECONDS = 45.0
"""How long a request that can't be deferred waits for a head that is starting: less than the SDK's
own 60 s."""
_RESPONSE_SECONDS = 60.0
"""How long a head that has received a whole request may take to respond. Long operations return
futures, and the SDK waits no longer than this."""
_MAX_MOVES = 2
"""How often one request follows its target to another head."""
_MOVING = Pending("active", "the run is being moved to another session head; send it again")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a submission goes: to a head, or to the store until the head of its target is ready."""

    target: str
    """The model or sampling session, after the caller's right to it was checked."""
    endpoint: HeadEndpoint | None
    """The head; None if it was not ready within a long poll."""
    reason: str = ""
    """Why the head is not ready."""


@dataclass(slots=True)
class Call:
    """One request, its caller, and the state of its response."""

    server: Context
    request: HotRequest
    raw_send: Send
    principal: Principal
    """The caller."""
    recorded: RecordedPath | None = None
    """The parts of the path, if it is that of a recorded session."""
    has_answered: bool = False
    """Whether any part of the response has been sent."""
    status: int | None = None
    """Status of the response; None until the response has started."""
    is_stream: bool = False
    """Whether the response is a stream of server-sent events."""

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the response (ASGI)."""
        self.has_answered = True
        self.status = message.get("status", self.status)
        if message["type"] == "http.response.start":
            content_type = dict(message["headers"]).get(b"content-type", b"")
            self.is_stream = content_type.startswith(b"text/event-stream")
        await self.raw_send(message)

    async def submit(
        self,
        destination: Destination,
        body: bytes | AsyncIterator[bytes],
        *,
        refusal: str | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """Forward a submission to the head of its target, or promise its result until then.

        The SDK repeats a submission for five minutes only, whatever the status of the response, but
        polls for a promised result without a limit.

        Raises:
            Unavailable: the head is not ready, and the request has no number to promise its result
                by; the message states the reason.
            InvalidRequest: it asks for more samples than a head accepts, or its number was already
                used for another request.
            Overloaded: too many bytes of this owner's requests wait for heads.
        """
        if destination.endpoint is not None:
            target = destination.target
            await self.forward(destination.endpoint, target, body, refusal=refusal, extra=extra)
            return
        limits, deferred = self.server.settings.limits, self.server.checkpoints.deferred
        declared = self.request.headers.get("content-length", "")
        num_bytes = int(declared) if declared.isdigit() else limits.max_body_bytes
        owner = self.principal.owner
        with deferred.room(owner, num_bytes, limits.max_queued_bytes):
            content = body if isinstance(body, bytes) else await _whole(body, limits.max_body_bytes)
            request_id, promise = await asyncio.to_thread(self._promise, destination, content)
            await deferred.add(
                Deferred(
                    target=destination.target,
                    seq_id=request_id.seq_id,
                    owner=owner,
                    path=quote(self.request.path),
                    headers={
                        name: self.request.headers[name]
                        for name in FORWARDED_HEADERS
                        if name in self.request.headers
                    },
                    extra=dict(extra or {}),
                    body=content,
                    refusal=refusal,
                )
            )
        self.server.deliveries.begin(destination.target)
        await respond(self.send, promise)

    def _promise(self, destination: Destination, body: bytes) -> tuple[RequestId, bytes]:
        """Return the id of a submission and the response with which a head would accept it.

        Raises:
            Unavailable: only the head can number the request.
            InvalidRequest: it asks for more samples than a head accepts.
        """
        seq_id, num_samples = _numbers(self.request.headers, body)
        try:
            request_id = RequestId.parse(f"{destination.target}:{seq_id}")
        except InvalidRequest:
            raise Unavailable(destination.reason) from None
        if isinstance(request_id.target, SamplingSessionId):
            if num_samples > MAX_SAMPLES:
                # Each sample has an id in the promise.
                raise InvalidRequest(f"num_samples: must be 1 to {MAX_SAMPLES}, got {num_samples}")
            samples = request_id.sequence_ids(num_samples)
            return request_id, future_responses.sample_promise(str(request_id), samples)
        return request_id, future_responses.promise(str(request_id), model_id=destination.target)

    async def forward(
        self,
        endpoint: HeadEndpoint,
        target: str,
        body: bytes | AsyncIterator[bytes],
        *,
        replace: Mapping[int, tuple[int, bytes] | WireError] | None = None,
        refusal: str | None = None,
        extra: Mapping[str, str] | None = None,
        timeout_seconds: float = _RESPONSE_SECONDS,
        max_moves: int = _MAX_MOVES,
    ) -> None:
        """Forward to a head, as `Proxy.forward` does.

        If the target is being moved to another head, the request is held and sent there. A body
        that has been streamed to the first head cannot be sent again.
        """
        while True:
            try:
                return await self.server.proxy.forward(
                    self.send,
                    endpoint,
                    quote(self.request.path),
                    target=target,
                    owner=self.principal.owner,
                    headers=self.request.headers,
                    body=body,
                    replace=replace,
                    refusal=refusal,
                    extra={**self.server.tenants.headers(self.principal.owner), **(extra or {})},
                    timeout_seconds=timeout_seconds,
                )
            except StaleEndpoint:
                self.server.provider.invalidate(endpoint)
                self.server.locator.note_refusal(target, endpoint)
                if max_moves == 0 or not isinstance(body, bytes):
                    raise
            max_moves -= 1
            following = self.server.locator.head_after(target, endpoint)
            endpoint = await wait_for_head(following, lambda: _MOVING)

    def of_own(self, path: str, body: bytes, send: Send) -> "Call":
        """Return a request of this server for the same caller, with a JSON body and response.

        Args:
            path: path of the request.
            body: its body.
            send: receives the response (ASGI).
        """
        headers = [(b"content-type", JSON.encode()), (b"accept", JSON.encode())]
        scope = {"method": "POST", "path": path, "headers": headers}

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        request = HotRequest(scope, receive, len(body))
        return Call(self.server, request, send, self.principal)


Handler = Callable[[Call], Awaitable[None]]


async def head_for_run(call: Call, model_id: str) -> Destination:
    """Return where a submission for a model goes.

    Raises:
        NotFound: the model does not exist for this caller.
        HeadFailed: its head failed to start; the message states the reason.
    """
    locator = call.server.locator
    await locator.known.authorize_run(model_id, call.principal)
    call.server.activity.touch(model_id)
    endpoint = locator.head_at_once(model_id)
    if endpoint is not None and not call.server.long_polls.is_stopping:
        return Destination(model_id, endpoint)
    return await find_head(
        call,
        model_id,
        lambda: locator.head_of_run(model_id),
        lambda: locator.run_pending(model_id),
    )


async def find_head(
    call: Call,
    target: str,
    head: Callable[[], Awaitable[HeadEndpoint]],
    why: Callable[[], Pending],
) -> Destination:
    """Wait for the head of a submission, for as long as a long poll, or until the server stops."""
    try:
        with call.server.long_polls.track():
            async with asyncio.timeout(call.server.settings.timings.long_poll_seconds):
                return Destination(target, await head())
    except (TimeoutError, ShuttingDown):
        return Destination(target, None, why().reason)


async def wait_for_head(head: Awaitable[HeadEndpoint], why: Callable[[], Pending]) -> HeadEndpoint:
    """Wait for a head for as long as a client waits for a response.

    Raises:
        Unavailable: the head is not ready yet; the message states the reason.
    """
    try:
        async with asyncio.timeout(_WAIT_SECONDS):
            return await head
    except TimeoutError:
        raise Unavailable(why().reason) from None


async def _whole(chunks: AsyncIterator[bytes], max_bytes: int) -> bytes:
    """Read a body to its end.

    Raises:
        BodyTooLarge: it is longer than `max_bytes`.
    """
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLarge(
                f"request body: larger than {max_bytes} bytes; send less data per request"
            )
    return await asyncio.to_thread(bytes, body)


def _numbers(headers: Mapping[str, str], body: bytes) -> tuple[object, int]:
    """Return the seq_id of a submission, None if it has none, and its number of samples."""
    if not future_responses.is_json(headers.get("content-type", "")):
        is_compressed = headers.get("content-encoding") == "zstd"
        plain = decompress(body, envelope.PREFIX_BYTES) if is_compressed else body
        return envelope.peek_training(plain[: envelope.PREFIX_BYTES]).seq_id or None, 1
    return envelope.peek_number(body, "seq_id"), envelope.peek_number(body, "num_samples") or 1
