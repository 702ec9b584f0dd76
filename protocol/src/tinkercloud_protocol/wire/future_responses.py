"""Responses about queued requests: the promise on submission, and results of retrieve_future.

| state | status | body |
|---|---|---|
| pending | 408 | `{"type": "try_again", request_id, queue_state, queue_state_reason?}` |
| failed | 200 | `{"error": <sentence>, "category": "user" / "server" / "unknown"}` |
| too large for one answer | 200 | `{"status": "complete_metadata", "response_payload_size": n}` |
| finished | 200 | protobuf (forward_backward, asample) or a JSON object without the key `error` |

A result that is too large for one answer (`INLINE_BYTES`) is described only to clients that ask for
it (`allow_metadata_only`), and returned when they ask again without.

Clients that do not accept protobuf receive the protobuf results in JSON (`json_results`).

The status of pending responses is 408 instead of 200, because the SDK logs a warning for each of
the latter. Pending responses must be delayed (long poll), because the SDK retries them without any
delay.
"""

from dataclasses import dataclass
from typing import Literal

import orjson

from tinkercloud_protocol.wire.errors import Category, WireError

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]

PENDING_STATUS = 408
INLINE_BYTES = 1 << 20
"""Largest result that is returned without announcing its size, if the client can read that."""
JSON = "application/json"
PROTOBUF = "application/x-protobuf"


def is_json(content_type: str) -> bool:
    """Return whether a request body of this type is JSON.

    `curl -d` says `application/x-www-form-urlencoded` without a type of its own.
    """
    kind = content_type.split(";", maxsplit=1)[0].strip().lower()
    return kind in {JSON, "application/x-www-form-urlencoded"}


def accepts_protobuf(accept: str | None) -> bool:
    """Return whether a client accepts protobuf, by its header Accept, as SDKs from 0.25 send it."""
    return accept is not None and PROTOBUF in accept.lower()


@dataclass(frozen=True, slots=True)
class Result:
    """The encoded result of a request, which can be returned any number of times."""

    body: bytes
    content_type: str


_ACCEPTED = "the request is accepted; retrieve_future returns its result"
"""For people who read the response. The SDK ignores it."""


def promise(request_id: str, **ids: str) -> bytes:
    """Return the response to an accepted training request; `ids` are those of its objects."""
    return orjson.dumps({"request_id": request_id, "message": _ACCEPTED, **ids})


def sample_promise(request_id: str, sequence_ids: list[str]) -> bytes:
    """Return the response to an accepted sampling request, with a sequence id for each sample."""
    answer = {"request_id": request_id, "message": _ACCEPTED}
    return orjson.dumps({**answer, "sample_sequence_ids": sequence_ids})


def pending(
    request_id: str, queue_state: QueueState = "active", reason: str | None = None
) -> bytes:
    """Return the body of a 408 response: the result is not available yet."""
    answer = {"type": "try_again", "request_id": request_id, "queue_state": queue_state}
    if reason is not None:
        answer["queue_state_reason"] = reason
    return orjson.dumps(answer)


def finished(answer: dict[str, object]) -> Result:
    """Return a JSON result. It must not have the key `error`, which the SDK reads as failure."""
    return _kept(answer)


def _kept(content: dict[str, object]) -> Result:
    # A copy: the bytes of orjson occupy 4 KiB however short they are, and results are kept.
    return Result(bytes(memoryview(orjson.dumps(content))), JSON)


def metadata_of(result: Result) -> Result:
    """Return the answer that a result is complete: its size, for which the client makes room."""
    size = len(result.body)
    return Result(
        orjson.dumps({"status": "complete_metadata", "response_payload_size": size}), JSON
    )


def failed(message: str, category: Category) -> Result:
    """Return a terminal failure; the SDK raises RequestFailedError and never retries it."""
    return _kept({"error": message, "category": category})


def failed_with(error: WireError) -> Result:
    """Return the terminal failure for an error of a request that was already accepted."""
    return failed(error.message, error.category)
