"""Sampling requests, which the session head of their sampling session executes."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from tinkercloud_api.routes.requests.call import SMALL_BODY_BYTES, Call, find_head
from tinkercloud_protocol.requests.sampling_requests import NamedWeights
from tinkercloud_protocol.wire import envelope, routes
from tinkercloud_protocol.wire.errors import InvalidRequest

_WEIGHTS = tuple(NamedWeights.model_fields)


@dataclass(frozen=True, slots=True)
class RoutedSample:
    """A sampling request and the sampling session that executes it."""

    sampler_id: str
    body: bytes
    extra: dict[str, str]
    """Headers for the head: the weights that the server has resolved, if it did."""


async def asample(call: Call) -> None:
    """Forward a sampling request to a head that serves its sampling session."""
    sample, locator = await route_sample(call), call.server.locator
    destination = await find_head(
        call,
        sample.sampler_id,
        lambda: locator.head_of_sampler(sample.sampler_id),
        lambda: locator.sampler_pending(sample.sampler_id),
    )
    await call.submit(destination, sample.body, extra=sample.extra)


async def route_sample(call: Call) -> RoutedSample:
    """Find the sampling session of a request, which may name weights instead.

    Raises:
        NotFound: the sampling session or the weights do not exist for this caller.
        InvalidRequest: the request names neither, or both a model and other weights.
    """
    body = await call.request.body()
    locator = call.server.locator
    named = None
    try:
        sampler_id = envelope.peek_json(body, "sampling_session_id")
    except InvalidRequest:
        is_long = len(body) > SMALL_BODY_BYTES
        named = await asyncio.to_thread(_named, body) if is_long else _named(body)
        sampler_id = await call.server.sampling_sessions.of(named, call.principal)
    await locator.known.authorize_sampler(sampler_id, call.principal)
    if (run_id := await locator.known.run_of_sampler(sampler_id)) is not None:
        call.server.activity.touch(run_id)
    extra = {routes.WEIGHTS_HEADER: named.as_header()} if named is not None else {}
    return RoutedSample(sampler_id, body, extra)


def _named(body: bytes) -> NamedWeights:
    """Read the weights that a body names; the head checks that it reads the same.

    Raises:
        InvalidRequest: it names none, or too many.
    """
    found = {}
    for name in _WEIGHTS:
        with suppress(InvalidRequest):
            found[name] = envelope.peek_json(body, name)
    return NamedWeights.read(found)
