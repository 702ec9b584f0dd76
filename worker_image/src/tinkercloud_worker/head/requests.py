"""The requests that have a place in a model's order: how each is read, and what it is there."""

import hashlib
from collections.abc import Mapping

import orjson
from pydantic import BaseModel

from tinkercloud_protocol import routes
from tinkercloud_protocol.envelope import TrainingEnvelope
from tinkercloud_protocol.errors import InvalidRequest, WireError
from tinkercloud_protocol.payloads import ForwardBackwardRequest, decode_forward_backward
from tinkercloud_protocol.training import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkercloud_protocol.wire import parse_json
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
"""By path, why; they have a place in the order all the same."""


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


def read_batch(body: bytes, place: TrainingEnvelope) -> ForwardBackwardRequest:
    """Read a forward_backward request whose beginning named its place.

    Raises:
        InvalidRequest: the body is not such a request, or has another place as a whole.
    """
    request = decode_forward_backward(body)
    place.check(request.model_id, request.seq_id)
    return request


def role_of_unread(path: str) -> Role:
    """Return what a request that can't be read counts as: the most it could have been."""
    if path == routes.FORWARD_BACKWARD:
        return "gradient"
    return "step" if path == routes.OPTIM_STEP else "other"


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
