"""Requests that the server rejects before a head reads them, and their sequence positions.

A request that states a model and a sequence number fails at that position, through its future. An
HTTP error status would leave a gap in the sequence, and all later requests would wait for it.
"""

import asyncio
from typing import TypeVar

from tinkercloud_api.routes.requests.call import Call, head_for_run
from tinkercloud_protocol.requests.training_requests import (
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkercloud_protocol.wire import envelope
from tinkercloud_protocol.wire.errors import BodyTooLarge, NotFound, WireError

SaveRequest = SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest
RequestT = TypeVar("RequestT", bound=LoadWeightsRequest | SaveRequest)

_MAX_REASON_CHARACTERS = 2000
"""Limit of a rejection's reason, which is sent in a header and may quote the request."""


async def reject_unknown_call(call: Call) -> None:
    """Reject an unsupported call, at its position in its model's sequence if it states one."""
    path = call.request.path
    reason = (
        f"POST {path} is not supported by this server; docs/use/sdk.md lists the supported calls"
    )
    await reject_in_sequence(call, NotFound(reason))


async def reject_in_sequence(call: Call, error: WireError) -> None:
    """Reject a request at the sequence position that its JSON body states, anywhere in the body.

    Raises:
        WireError: `error` itself, if the body states no position.
    """
    try:
        body = await call.request.body()
    except BodyTooLarge:
        body = call.request.prefix
    position = await asyncio.to_thread(envelope.peek_json_place, body)
    if not envelope.names_place(position):
        raise error
    await forward_rejection(call, position, error)


async def forward_rejection(call: Call, body: bytes, error: WireError) -> None:
    """Have the head fail a request at its position in its model's sequence.

    Raises:
        WireError: `error` itself, if the request states no such position.
    """
    if not envelope.names_place(envelope.peek_json_place(body)):
        raise error
    model_id = envelope.peek_json(body, "model_id")
    destination = await head_for_run(call, model_id)
    await call.submit(destination, body, refusal=error.message[:_MAX_REASON_CHARACTERS])


def sequence_position(request: LoadWeightsRequest | SaveRequest) -> bytes:
    """Return a body that states a request's position in its model's sequence, and nothing else.

    A head from a release without rejections would execute the whole request, even if the caller
    has no right to it, so the rest of the request is not sent.
    """
    return request.model_dump_json(include={"model_id", "seq_id"}).encode()
