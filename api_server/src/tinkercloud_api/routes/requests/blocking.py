"""sample: like asample, but the response is the result.

The server sends the request to the head like an asample request, and waits for its future. A client
that disconnects cancels its request, unless it can repeat it.
"""

import asyncio
from http import HTTPStatus

import orjson

from tinkercloud_api.routes.requests import future_routes, sampling_routes
from tinkercloud_api.routes.requests.answers import ResultAnswer
from tinkercloud_api.routes.requests.call import Call, wait_for_head
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.asgi import Message
from tinkercloud_protocol.wire.errors import Unavailable


async def sample(call: Call) -> None:
    """Sample, wait for the result and respond with it.

    Raises:
        Unavailable: the head is not ready; the message states the reason.
    """
    routed, locator = await sampling_routes.route_sample(call), call.server.locator
    endpoint = await wait_for_head(
        locator.head_of_sampler(routed.sampler_id),
        lambda: locator.sampler_pending(routed.sampler_id),
    )
    response: list[Message] = []

    async def keep(message: Message) -> None:
        response.append(message)

    asked = call.of_own(routes.ASAMPLE, routed.body, keep)
    if (key := call.request.headers.get(routes.IDEMPOTENCY_HEADER)) is not None:
        asked.request.headers[routes.IDEMPOTENCY_HEADER] = key
    await asked.forward(endpoint, routed.sampler_id, routed.body, extra=routed.extra)
    if asked.status != HTTPStatus.OK:
        for message in response:
            await call.send(message)
        return
    promise = orjson.loads(b"".join(message.get("body", b"") for message in response))
    request_id = str(promise["request_id"])
    finished = await call.request.run_until_disconnected(_respond_with_result(call, request_id))
    if not finished and key is None:
        await _cancel(call, request_id)


async def _respond_with_result(call: Call, request_id: str) -> None:
    settings = call.server.settings
    answer = ResultAnswer(call.send)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.sample_wait_seconds
    while (left := deadline - loop.time()) > 0 and not call.server.long_polls.is_stopping:
        answer.is_pending = False
        poll = call.of_own(routes.RETRIEVE_FUTURE, _named(request_id), answer.send)
        try:
            await future_routes.retrieve(poll, min(left, settings.timings.long_poll_seconds))
        except Unavailable:
            if call.has_answered:
                raise
            # The head is being replaced; the next round finds the new one.
            await asyncio.sleep(min(left, 1.0))
            continue
        if not answer.is_pending:
            return
    await answer.respond(
        {
            "detail": "the samples are not ready yet; `sample` waits for at most"
            f" {settings.sample_wait_seconds:g} s (sample_wait_seconds). Poll retrieve_future with"
            f" request_id {request_id!r}",
            "request_id": request_id,
        },
        HTTPStatus.SERVICE_UNAVAILABLE,
    )


async def _cancel(call: Call, request_id: str) -> None:
    async def discard(_message: Message) -> None: ...

    await future_routes.cancel_future(
        call.of_own(routes.CANCEL_FUTURE, _named(request_id), discard)
    )


def _named(request_id: str) -> bytes:
    return orjson.dumps({"request_id": request_id})
