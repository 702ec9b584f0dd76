"""Parses the requests that have a place in a model's order.

Parsing a large request would block the event loop for too long, so all functions here may run in
threads. The order is unaffected: it goes by number, not by arrival.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import orjson
from pydantic import BaseModel

from tinkercloud_protocol.requests.json_payloads import Json, decode_batch, load_batch
from tinkercloud_protocol.requests.payloads import decode_forward_backward
from tinkercloud_protocol.requests.sampling_requests import SampleRequest, free_sample_number
from tinkercloud_protocol.requests.tensors import ForwardBackwardRequest
from tinkercloud_protocol.requests.training_requests import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.envelope import TrainingEnvelope, peek_json_place
from tinkercloud_protocol.wire.errors import InvalidRequest, WireError
from tinkercloud_protocol.wire.ids import RequestId, SamplingSessionId
from tinkercloud_protocol.wire.json_model import parse_json
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest
from tinkercloud_worker.head.order.queued_request import Role

OrderedJson = (
    OptimStepRequest
    | SaveWeightsRequest
    | SaveWeightsForSamplerRequest
    | SaveWeightsExternalRequest
    | LoadWeightsRequest
)
OrderedRequest = ForwardBackwardRequest | OrderedJson

JSON_REQUESTS: Mapping[str, type[OrderedJson]] = {
    routes.OPTIM_STEP: OptimStepRequest,
    routes.SAVE_WEIGHTS: SaveWeightsRequest,
    routes.SAVE_WEIGHTS_FOR_SAMPLER: SaveWeightsForSamplerRequest,
    routes.SAVE_WEIGHTS_EXTERNAL: SaveWeightsExternalRequest,
    routes.LOAD_WEIGHTS: LoadWeightsRequest,
}
"""Request type by path. The other ordered paths are forward_backward and forward."""

JSON_FORWARD_BACKWARD = f"{routes.FORWARD_BACKWARD} in JSON"
"""The path of a queued forward_backward whose body is JSON, not protobuf."""


def read(path: str, body: bytes) -> OrderedRequest:
    """Parse a request sent to one of the ordered paths.

    Raises:
        InvalidRequest: the body is invalid.
    """
    if path == routes.FORWARD_BACKWARD:
        return decode_forward_backward(body)
    if path in {JSON_FORWARD_BACKWARD, routes.FORWARD}:
        return _read_json_batch(path, load_batch(body))
    return parse_json(JSON_REQUESTS[path], body)


def _read_json_batch(path: str, content: Json) -> ForwardBackwardRequest:
    request = decode_batch(content)
    return replace(request, forward_only=request.forward_only or path == routes.FORWARD)


@dataclass(frozen=True, slots=True)
class Received:
    """A request with a place in its model's order, as its queue needs it."""

    place: TrainingEnvelope
    path: str
    body: bytes
    content: OrderedRequest | WireError
    """The parsed request, or the error if it is invalid."""
    digest: bytes
    """Equal for equal content."""
    size: int
    """Bytes it takes while it waits."""

    @property
    def is_numbered(self) -> bool:
        """Whether the client has numbered it."""
        return self.place.seq_id > 0

    def numbered(self, seq_id: int) -> "Received":
        """Return the request with a number."""
        content = self.content
        if not isinstance(content, WireError):
            content = with_number(content, seq_id)
        place = replace(self.place, seq_id=seq_id)
        return replace(self, place=place, content=content)


def with_number(request: OrderedRequest, seq_id: int) -> OrderedRequest:
    """Return a request with a number."""
    if isinstance(request, ForwardBackwardRequest):
        return replace(request, seq_id=seq_id)
    return request.model_copy(update={"seq_id": seq_id})


def _received(path: str, body: bytes, request: OrderedRequest, size: int) -> Received:
    if request.model_id is None:
        raise InvalidRequest("model_id is required; create models through /models")
    digest = content_digest(request)
    if not request.seq_id:
        # Never equal to that of a request which the client has numbered.
        digest = body_digest(b"without seq_id" + digest)
    place = TrainingEnvelope(request.model_id, request.seq_id or 0)
    return Received(place, path, body, request, digest, size)


def receive_batch(body: bytes, place: TrainingEnvelope) -> Received:
    """Parse a forward_backward request whose prefix named its place.

    Raises:
        InvalidRequest: it is invalid and has no number.
    """
    try:
        request = decode_forward_backward(body)
        place.check(request.model_id, request.seq_id)
    except InvalidRequest as error:
        if place.seq_id == 0:
            raise
        return receive_unread(routes.FORWARD_BACKWARD, body, place, error)
    size = max(len(body), request.num_bytes)
    return _received(routes.FORWARD_BACKWARD, body, request, size)


def receive_json_batch(path: str, body: bytes) -> Received:
    """Parse a batch in JSON, sent to `JSON_FORWARD_BACKWARD` or forward.

    Raises:
        InvalidRequest: it is invalid, and names no place in a model's order.
    """
    try:
        content = load_batch(body)
    except InvalidRequest as error:
        return receive_refused(path, peek_json_place(body), error)
    place = _place(content)
    try:
        request = _read_json_batch(path, content)
    except InvalidRequest as error:
        if place is None:
            raise
        return receive_unread(path, body, place, error)
    return _received(path, body, request, max(len(body), request.num_bytes))


def receive_json(path: str, body: bytes) -> Received:
    """Parse a request sent to another ordered path.

    Raises:
        InvalidRequest: it is invalid, and names no place in a model's order.
    """
    try:
        request = read(path, body)
    except InvalidRequest as error:
        return receive_refused(path, body, error)
    return _received(path, body, request, len(body))


def receive_refused(path: str, body: bytes, error: InvalidRequest) -> Received:
    """Return a rejected JSON request with the place that it names.

    Raises:
        InvalidRequest: the body names no place; this is the given error.
    """
    place = _json_place(body)
    if place is None:
        raise error
    return receive_unread(path, body, place, error)


def receive_unread(path: str, body: bytes, place: TrainingEnvelope, error: WireError) -> Received:
    """Return an unreadable request with its place; `body` may be only its beginning."""
    return Received(place, path, body, error, body_digest(body), size=0)


def _json_place(body: bytes) -> TrainingEnvelope | None:
    """Return the place that a JSON body names; None if it has none."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return _place(content) if isinstance(content, dict) else None


def _place(content: Json) -> TrainingEnvelope | None:
    """Return the place that a JSON object names; None if it has none."""
    model_id, seq_id = content.get("model_id"), content.get("seq_id")
    if not isinstance(model_id, str) or type(seq_id) is not int or not 1 <= seq_id < 2**31:
        return None
    return TrainingEnvelope(model_id, seq_id)


_PATHS_WITHOUT_GRADIENT = {
    *JSON_REQUESTS,
    routes.FORWARD,
    routes.UNLOAD_MODEL,
}


def role_of_unread(path: str) -> Role:
    """Return the role of an unreadable request: the one with the most consequences.

    On an unknown path, such as one of a later SDK, it counts as part of the gradient.
    """
    if path == routes.OPTIM_STEP:
        return "step"
    return "other" if path in _PATHS_WITHOUT_GRADIENT else "gradient"


def restored_error(body: bytes) -> WireError:
    """Return the error that a rejected request was stored with (`queue.refusal`)."""
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
    """A validated sampling request."""

    request: SampleRequest
    """The original request."""
    validated: SamplingRequest
    digest: bytes
    """Equal for equal content."""
    size: int
    """Bytes it takes while it waits."""

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        return sample_request_id(self.request)


def named_sample(request: SampleRequest, key: str | None) -> SampleRequest:
    """Return an unnumbered sampling request; its number follows from its idempotency key."""
    if key is None:
        return request
    name = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return request.model_copy(update={"seq_id": free_sample_number(int.from_bytes(name))})


def sample_request_id(request: SampleRequest) -> RequestId:
    """Return the id of a sampling request."""
    return RequestId(SamplingSessionId.parse(request.sampling_session_id), request.seq_id)
