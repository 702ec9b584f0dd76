"""Requests that are refused before a head reads them, and what becomes of their places.

Whatever names a model and a number in its order fails there, by its future: an answer with a status
would leave a hole in the order, for which all that follows would wait.
"""

import asyncio
from typing import TypeVar

from tinkercloud_api.routes.call import Call, head_for_run
from tinkercloud_protocol import envelope, routes
from tinkercloud_protocol.errors import BodyTooLarge, InvalidRequest, NotFound, WireError
from tinkercloud_protocol.training import (
    LoadWeightsRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

RequestT = TypeVar("RequestT", LoadWeightsRequest, SaveWeightsRequest, SaveWeightsForSamplerRequest)

_REFUSAL_CHARACTERS = 2000
"""Of a reason, which travels in a header: it may quote what was sent."""
OLD_SDK = (
    "forward_backward in JSON, as SDKs before 0.25 send it, is not served: it wants protobuf;"
    " upgrade with pip install -U tinker"
)
_NOT_SERVED_IN_ORDER = {
    routes.FORWARD: (
        "forward in JSON, as SDKs before 0.25 send it, is not served: upgrade with"
        " pip install -U tinker, whose forward passes are forward_backward requests"
    ),
}
"""Why, by path."""


async def reject_unknown_call(call: Call) -> None:
    """Refuse a call that is not served, in its place in its model's order if it names one."""
    path = call.request.path
    reason = _NOT_SERVED_IN_ORDER.get(path)
    if reason is None:
        reason = (
            f"POST {path} is not served here: see what is and what is not in Tinkercloud's README"
        )
    await reject_in_sequence(call, NotFound(reason))


async def reject_in_sequence(call: Call, error: WireError) -> None:
    """Refuse a request in the place that its JSON body names, wherever in it that stands.

    Raises:
        WireError: the one given; the body names no place.
    """
    try:
        body = await call.request.body(call.server.settings.limits.max_body_bytes)
    except BodyTooLarge:
        body = call.request.beginning
    place = await asyncio.to_thread(envelope.peek_json_place, body)
    if not envelope.names_place(place):
        raise error
    await forward_rejection(call, place, error)


async def forward_rejection(call: Call, body: bytes, error: WireError) -> None:
    """Let a request that is refused take its place in its model's order, and fail there.

    An answer with a status would leave a hole in the order, for which all that follows would wait.

    Raises:
        WireError: the one given; the request names no model.
    """
    try:
        model_id = envelope.peek_json(body, "model_id")
    except InvalidRequest:
        raise error from None
    route = await head_for_run(call, model_id)
    await call.forward(route, model_id, body, refusal=error.message[:_REFUSAL_CHARACTERS])


def sequence_position(
    request: LoadWeightsRequest | SaveWeightsRequest | SaveWeightsForSamplerRequest,
) -> bytes:
    """Return a body that names a request's place in its model's order, and nothing else.

    A head that is older than refusals would do what it is told, whoever may ask for it: it is not
    told.
    """
    return request.model_dump_json(include={"model_id", "seq_id"}).encode()
