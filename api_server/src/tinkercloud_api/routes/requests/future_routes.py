"""Futures: retrieving the result of a request by long polling, and cancelling it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
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
    try:
        has_finished = call.server.deliveries.has_finished(target)
        endpoint = locator.head_at_once(target) if has_finished else None
        if endpoint is None:
            head = _after_deliveries(call, target, locator.head_of_run(target))
            endpoint = await _wait_while_polling(head, seconds)
    except TimeoutError:
        await _respond_pending(call, request_id, locator.run_pending(target))
        return
    except WireError as error:
        if may_change:
            await _withdraw(call, request_id, error)
        await respond(call.send, future_responses.failed_with(error).body)
        return
    poll = partial(
        call.forward_once,
        endpoint,
        target,
        body,
        extra=_waiting(call, seconds) | _reading(may_change),
        timeout_seconds=_poll_seconds(call),
    )
    await _forward_poll(call, request_id, poll, {})


async def _retrieve_sample(call: Call, request_id: RequestId, body: bytes, seconds: float) -> None:
    target, locator = str(request_id.target), call.server.locator
    may_change = await locator.known.authorize_sampler(target, call.principal)
    try:
        head = _after_deliveries(call, target, locator.head_of_sample(target))
        endpoint = await _wait_while_polling(head, seconds)
    except TimeoutError:
        await _respond_pending(call, request_id, locator.sampler_pending(target))
        return
    except WireError as error:
        if may_change:
            await _withdraw(call, request_id, error)
        await respond(call.send, future_responses.failed_with(error).body)
        return
    # A head that does not know the request is not the one that received it. On 410 the SDK sends
    # the sampling request again.
    replace = {404: _GONE} if await locator.known.can_sample_again(target) else {}
    poll = partial(
        call.forward_once,
        endpoint,
        target,
        body,
        extra=_waiting(call, seconds) | _reading(may_change),
        timeout_seconds=_poll_seconds(call),
    )
    await _forward_poll(call, request_id, poll, replace)


async def _forward_poll(
    call: Call,
    request_id: RequestId,
    poll: Callable[..., Awaitable[None]],
    replace: Mapping[int, tuple[int, bytes]],
) -> None:
    """Forward a poll; deliver the request first if it is still deferred.

    Args:
        call: the poll.
        request_id: the request whose result it waits for.
        poll: forwards the poll, with responses to substitute (`Proxy.forward`).
        replace: responses to substitute if the head does not know the request.
    """
    try:
        await poll(replace={404: _Unknown(""), 410: _Unknown("")})
    except _Unknown:
        # Another server may have deferred it, or a process that has ended since.
        try:
            is_delivered = await call.server.deliveries.deliver(str(request_id.target))
        except WireError as error:
            if may_pass(error):
                raise Unavailable(error.message) from None
            raise
        if is_delivered:
            pending = future_responses.pending(str(request_id))
            await respond(call.send, pending, status=future_responses.PENDING_STATUS)
        else:
            await poll(replace=replace)


async def _after_deliveries(call: Call, target: str, head: Awaitable[HeadEndpoint]) -> HeadEndpoint:
    """Return the head of a target, if possible once it has what this process has deferred."""
    endpoint = await head
    await call.server.deliveries.finished(target)
    return endpoint


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


def _poll_seconds(call: Call) -> float:
    """Return how long a head may take to respond to a poll."""
    return call.server.settings.timings.long_poll_seconds + _POLL_MARGIN_SECONDS


def _waiting(call: Call, seconds: float) -> dict[str, str]:
    """Return the header of a request that waits less than a long poll."""
    is_long = seconds >= call.server.settings.timings.long_poll_seconds
    return {} if is_long else {routes.WAIT_HEADER: f"{seconds:g}"}


def _reading(may_change: bool) -> dict[str, str]:  # noqa: FBT001 - it is the only argument
    """Return the header of a request for a result by one who may not change the run.

    Otherwise its member, who asks later, might find that the result was dropped as delivered.
    """
    return {} if may_change else {routes.PEEK_HEADER: "true"}


async def _wait_while_polling(head: Awaitable[HeadEndpoint], seconds: float) -> HeadEndpoint:
    """Wait for a head for the duration of a long poll.

    Raises:
        TimeoutError: the head is not ready or could not be reached; the client should poll again.
    """
    async with asyncio.timeout(max(seconds, _LOOKUP_SECONDS)):
        try:
            return await head
        except Unavailable:
            # The SDK retries without any delay of its own.
            await asyncio.sleep(min(seconds, _RETRY_SECONDS))
            raise TimeoutError from None


async def _respond_pending(call: Call, request_id: RequestId, pending: Pending) -> None:
    body = future_responses.pending(str(request_id), pending.queue_state, pending.reason)
    await respond(call.send, body, status=future_responses.PENDING_STATUS)
