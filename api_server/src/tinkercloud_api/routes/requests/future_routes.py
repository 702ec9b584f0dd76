"""Futures: retrieving the result of a request by long polling, and cancelling it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import orjson

from tinkercloud_api.heads.deliveries import may_pass
from tinkercloud_api.providers.base import HeadEndpoint, Pending
from tinkercloud_api.routes.requests import loss_routes, unloading
from tinkercloud_api.routes.requests.call import Call
from tinkercloud_api.web.long_polls import ShuttingDown
from tinkercloud_protocol.requests.sampling_requests import RetrieveFutureRequest
from tinkercloud_protocol.wire import future_responses, routes
from tinkercloud_protocol.wire.asgi import respond
from tinkercloud_protocol.wire.errors import (
    InvalidRequest,
    NotFound,
    Unavailable,
    WireError,
)
from tinkercloud_protocol.wire.ids import RequestId, SamplingSessionId
from tinkercloud_protocol.wire.json_model import parse_json

_RETRY_SECONDS = 1.0
_POLL_MARGIN_SECONDS = 20.0
"""Time that a head may take to respond after the end of a long poll. The SDK itself waits 25 s
longer than polls last by default."""
_GONE = (410, orjson.dumps({"detail": "this result no longer exists; send the request again"}))
_STOPPING = "the server is stopping; the next server process, or another replica, continues"
_LOOKUP_SECONDS = 2.0
"""How long a request that does not wait for a result waits for the head's address."""


class _Unknown(WireError):
    """The head does not know the request of a poll."""


async def retrieve_future(call: Call) -> None:
    """Wait for a result for as long as a long poll."""
    await retrieve(call, call.server.settings.timings.long_poll_seconds)


async def retrieve(call: Call, seconds: float) -> None:
    """Wait for a result at the head that computes it; a permanent loss is returned as a failure.

    Args:
        call: a retrieve_future request.
        seconds: how long to wait, at most as long as a long poll; 0 returns at once.
    """
    body = await call.request.body()
    name = parse_json(RetrieveFutureRequest, body).request_id
    if (model_id := unloading.unloaded_model(name)) is not None:
        await call.server.locator.known.authorize_run(model_id, call.principal)
        await respond(call.send, (await unloading.result_of(model_id, call.server)).body)
        return
    if (loss_id := loss_routes.created_loss(name)) is not None:
        result = await call.server.custom_losses.result(loss_id, call.principal)
        await respond(call.send, result.body)
        return
    request_id = _request_id(name)
    is_sample = isinstance(request_id.target, SamplingSessionId)
    at_head = _retrieve_sample if is_sample else _retrieve_training
    try:
        with call.server.long_polls.track():
            try:
                await at_head(call, request_id, body, seconds)
            except Unavailable as error:
                # The SDK retries without any delay of its own.
                await asyncio.sleep(_RETRY_SECONDS)
                pending = future_responses.pending(str(request_id), reason=error.message)
                await respond(call.send, pending, status=future_responses.PENDING_STATUS)
    except ShuttingDown:
        # The client polls again and reaches another replica or the next server process.
        if not call.has_answered:
            pending = future_responses.pending(str(request_id), "paused_capacity", _STOPPING)
            await respond(call.send, pending, status=future_responses.PENDING_STATUS)


async def _retrieve_training(
    call: Call, request_id: RequestId, body: bytes, seconds: float
) -> None:
    target, locator = str(request_id.target), call.server.locator
    may_change = await locator.known.authorize_run(target, call.principal)
    call.server.activity.touch(target)
    poll = _Poll(call, request_id, body, seconds, may_change)
    has_finished = call.server.deliveries.has_finished(target)
    endpoint = locator.head_at_once(target) if has_finished else None
    if endpoint is None:
        endpoint = await poll.find_head(locator.head_of_run(target), locator.run_pending)
    if endpoint is not None:
        await poll.forward(endpoint, {})


async def _retrieve_sample(call: Call, request_id: RequestId, body: bytes, seconds: float) -> None:
    target, locator = str(request_id.target), call.server.locator
    may_change = await locator.known.authorize_sampler(target, call.principal)
    poll = _Poll(call, request_id, body, seconds, may_change)
    endpoint = await poll.find_head(locator.head_of_sample(target), locator.sampler_pending)
    if endpoint is not None:
        # A head that does not know the request is not the one that received it. On 410 the SDK
        # sends the sampling request again.
        is_repeated = await locator.known.can_sample_again(target)
        await poll.forward(endpoint, {404: _GONE} if is_repeated else {})


@dataclass(frozen=True, slots=True)
class _Poll:
    """A poll whose caller may read the result."""

    call: Call
    request_id: RequestId
    """The request whose result it waits for."""
    body: bytes
    seconds: float
    may_change: bool
    """Whether the caller may change the run."""

    async def find_head(
        self, head: Awaitable[HeadEndpoint], why: Callable[[str], Pending]
    ) -> HeadEndpoint | None:
        """Wait for the head; answer the poll and return None if there is none."""
        target = str(self.request_id.target)
        try:
            async with asyncio.timeout(max(self.seconds, _LOOKUP_SECONDS)):
                try:
                    endpoint = await head
                except Unavailable:
                    # The SDK retries without any delay of its own.
                    await asyncio.sleep(min(self.seconds, _RETRY_SECONDS))
                    raise TimeoutError from None
                # If possible, once it has what this process has deferred.
                await self.call.server.deliveries.finished(target)
                return endpoint
        except TimeoutError:
            await _respond_pending(self.call, self.request_id, why(target))
        except WireError as error:
            if self.may_change:
                await _withdraw(self.call, self.request_id, error)
            await respond(self.call.send, future_responses.failed_with(error).body)
        return None

    async def forward(
        self, endpoint: HeadEndpoint, replace: Mapping[int, tuple[int, bytes]]
    ) -> None:
        """Forward the poll; deliver the request first if it is still deferred.

        Args:
            endpoint: the head.
            replace: responses to substitute if the head does not know the request.
        """
        target = str(self.request_id.target)
        long_poll = self.call.server.settings.timings.long_poll_seconds
        extra = {} if self.seconds >= long_poll else {routes.WAIT_HEADER: f"{self.seconds:g}"}
        if not self.may_change:
            # Its member, who asks later, might find that the result was dropped as delivered.
            extra[routes.PEEK_HEADER] = "true"
        forward = partial(
            self.call.forward,
            endpoint,
            target,
            self.body,
            extra=extra,
            timeout_seconds=long_poll + _POLL_MARGIN_SECONDS,
            max_moves=0,
        )
        try:
            await forward(replace={404: _Unknown(""), 410: _Unknown("")})
        except _Unknown:
            # Another server may have deferred it, or a process that has ended since.
            try:
                is_delivered = await self.call.server.deliveries.deliver(target)
            except WireError as error:
                if may_pass(error):
                    raise Unavailable(error.message) from None
                raise
            if is_delivered:
                pending = future_responses.pending(str(self.request_id))
                await respond(self.call.send, pending, status=future_responses.PENDING_STATUS)
            else:
                await forward(replace=replace)


async def _withdraw(call: Call, request_id: RequestId, error: WireError) -> None:
    """Withdraw a deferred request whose failure is reported: it must not run later.

    If a later head can serve the model, that head rejects the request at its position. Without it,
    the requests after it would wait.
    """
    deferred, target = call.server.checkpoints.deferred, str(request_id.target)
    with suppress(Unavailable):
        if may_pass(error):
            await deferred.refuse(target, request_id.seq_id, error.message)
        else:
            await deferred.remove(target, request_id.seq_id)


async def cancel_future(call: Call) -> None:
    """Forward a cancellation. Cancelling a request that has already finished is not an error."""
    body = await call.request.body()
    request_id = _request_id(parse_json(RetrieveFutureRequest, body).request_id)
    if not isinstance(request_id.target, SamplingSessionId):
        raise InvalidRequest("request_id: only sampling requests can be cancelled")
    target = str(request_id.target)
    await call.server.locator.known.authorize_sampler(target, call.principal)
    with suppress(Unavailable):
        await call.server.checkpoints.deferred.remove(target, request_id.seq_id)
    try:
        async with asyncio.timeout(_RETRY_SECONDS):
            endpoint = await call.server.locator.head_of_sample(target)
    except (WireError, TimeoutError):
        await respond(call.send, b"{}")
        return
    await call.forward(endpoint, target, body)


def _request_id(name: str) -> RequestId:
    """Read a request id.

    Raises:
        NotFound: it is not one of ours.
    """
    try:
        return RequestId.parse(name)
    except InvalidRequest as error:
        raise NotFound(error.message) from None


async def _respond_pending(call: Call, request_id: RequestId, pending: Pending) -> None:
    body = future_responses.pending(str(request_id), pending.queue_state, pending.reason)
    await respond(call.send, body, status=future_responses.PENDING_STATUS)
