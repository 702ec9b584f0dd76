"""The requests that have a place in a model's order: how each is read, and what it is there.

Reading one takes longer than the event loop should be held, if it is large: everything here may
run beside it. That keeps the order, which goes by number and not by arrival.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
from pydantic import BaseModel

from tinkercloud_protocol import routes
from tinkercloud_protocol.envelope import TrainingEnvelope
from tinkercloud_protocol.errors import InvalidRequest, WireError
from tinkercloud_protocol.ids import RequestId, SamplingSessionId
from tinkercloud_protocol.payloads import decode_forward_backward
from tinkercloud_protocol.sampling import SampleRequest
from tinkercloud_protocol.tensors import ForwardBackwardRequest
from tinkercloud_protocol.training import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkercloud_protocol.wire import parse_json
from tinkercloud_worker.engine.sampler import SamplingRequest
from tinkercloud_worker.head.queue import Role

OrderedJson = (
    OptimStepRequest | SaveWeightsRequest | SaveWeightsForSamplerRequest | LoadWeightsRequest
)
OrderedRequest = ForwardBackwardRequest | OrderedJson

JSON_REQUESTS: Mapping[str, type[OrderedJson]] = {
    routes.OPTIM_STEP: OptimStepRequest,
    routes.SAVE_WEIGHTS: SaveWeightsRequest,
    routes.SAVE_WEIGHTS_FOR_SAMPLER: SaveWeightsForSamplerRequest,
    routes.LOAD_WEIGHTS: LoadWeightsRequest,
}
"""By path; the only other one is forward_backward, whose body is protobuf."""


NOT_SERVED: Mapping[str, str] = {
    routes.SAVE_WEIGHTS_EXTERNAL: (
        "save_weights_external is not served: use save_weights_for_sampler, whose files (PEFT) lie"
        " in the server's checkpoint store under runs/<run>/sampler_weights/<name>"
    ),
}
"""Paths that are refused, and why. Their requests have a place in the order all the same."""


def read(path: str, body: bytes) -> OrderedRequest:
    """Read a request sent to one of the ordered paths.

    Raises:
        InvalidRequest: the body is not such a request.
    """
    if path == routes.FORWARD_BACKWARD:
        return decode_forward_backward(body)
    if path in NOT_SERVED:
        raise InvalidRequest(NOT_SERVED[path])
    return parse_json(JSON_REQUESTS[path], body)


@dataclass(frozen=True, slots=True)
class Received:
    """A request with a place in its model's order, and what its queue needs of it."""

    place: TrainingEnvelope
    path: str
    body: bytes
    content: OrderedRequest | WireError
    """Its content; or the error, of one that can't be read."""
    digest: bytes
    """Equal for equal content."""
    size: int
    """Bytes it takes while it waits."""


def receive_batch(body: bytes, place: TrainingEnvelope) -> Received:
    """Read a forward_backward request whose beginning named its place."""
    try:
        request = decode_forward_backward(body)
        place.check(request.model_id, request.seq_id)
    except InvalidRequest as error:
        return receive_unread(routes.FORWARD_BACKWARD, body, place, error)
    size = max(len(body), request.num_bytes)
    return Received(place, routes.FORWARD_BACKWARD, body, request, request.digest(), size)


def receive_json(path: str, body: bytes) -> Received:
    """Read a request sent to another of the ordered paths.

    Raises:
        InvalidRequest: the body names no place in a model's order.
    """
    try:
        request = read(path, body)
    except InvalidRequest as error:
        return receive_refused(path, body, error)
    if request.model_id is None or request.seq_id is None:
        raise InvalidRequest("model_id: required; models are created through /models")
    place = TrainingEnvelope(request.model_id, request.seq_id)
    return Received(place, path, body, request, content_digest(request), len(body))


def receive_refused(path: str, body: bytes, error: InvalidRequest) -> Received:
    """Give a JSON request that is refused the place that it names.

    Raises:
        InvalidRequest: the one given; the body names no place.
    """
    place = _json_place(body)
    if place is None:
        raise error
    return receive_unread(path, body, place, error)


def receive_unread(path: str, body: bytes, place: TrainingEnvelope, error: WireError) -> Received:
    """Give a request that can't be read, of which `body` may be the beginning, its place."""
    return Received(place, path, body, error, body_digest(body), size=0)


def _json_place(body: bytes) -> TrainingEnvelope | None:
    """Return the place that a JSON body names, if that much of it can be read."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(content, dict):
        return None
    model_id, seq_id = content.get("model_id"), content.get("seq_id")
    if not isinstance(model_id, str) or type(seq_id) is not int or not 1 <= seq_id < 2**31:
        return None
    return TrainingEnvelope(model_id, seq_id)


_KNOWN_TO_LEAVE_THE_GRADIENT = {
    *JSON_REQUESTS,
    *NOT_SERVED,
    routes.FORWARD,
    routes.UNLOAD_MODEL,
}


def role_of_unread(path: str) -> Role:
    """Return what a request that can't be read counts as: the most it could have been.

    On a path that nobody here knows, as of a later SDK, that is a part of the gradient.
    """
    if path == routes.OPTIM_STEP:
        return "step"
    return "other" if path in _KNOWN_TO_LEAVE_THE_GRADIENT else "gradient"


def refusal_again(body: bytes) -> WireError:
    """Return the error that a refused request was stored with (`queue.refusal`)."""
    failure = orjson.loads(body)
    kind = InvalidRequest if failure["category"] == "user" else WireError
    return kind(failure["error"])


def content_digest(request: ForwardBackwardRequest | BaseModel) -> bytes:
    """Return a digest that is equal for requests with equal content."""
    if isinstance(request, ForwardBackwardRequest):
        return request.digest()
    return body_digest(request.model_dump_json().encode())


def body_digest(body: bytes) -> bytes:
    """Return a digest of raw bytes."""
    return hashlib.blake2b(body, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sampling request that was found sound, and all that has to be known of it."""

    request: SampleRequest
    """As it came."""
    sound: SamplingRequest
    digest: bytes
    """Equal for equal content."""
    size: int
    """Bytes it takes while it waits."""

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        return sample_request_id(self.request)


def sample_request_id(request: SampleRequest) -> RequestId:
    """Return the id of a sampling request."""
    return RequestId(SamplingSessionId.parse(request.sampling_session_id), request.seq_id)
