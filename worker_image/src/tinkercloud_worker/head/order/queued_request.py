"""A request of a model: what it does, and its place in the model's order."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_protocol.wire.future_responses import Result, failed_with

Role = Literal["gradient", "step", "save", "load", "other"]
"""Whether a request adds to the gradient, applies, saves or replaces it, or none of these."""

REFUSED = "refused"
"""Path of a request that was rejected before it was queued; the body has the error."""


@dataclass(frozen=True, slots=True)
class RequestSource:
    """The HTTP request behind an operation, from which another process can rebuild it."""

    path: str
    """Path of the request (`protocol.routes`), or `REFUSED`."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Operation:
    """A parsed request.

    `run` returns either the result, or an awaitable of it that finishes in the background (an
    upload, for example) while the next requests run.
    """

    run: Callable[[], Awaitable[Result | Awaitable[Result]]]
    role: Role = "other"
    source: RequestSource | None = None
    """None for the request that creates a model, which is never stored."""
    has_large_result: bool = False
    """Whether it waits while unread results fill the owner's budget (`Results.has_room`)."""
    computes_at_once: bool = False
    """Whether it sends its computation to the engine as soon as it starts."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that has its place in the order and has not started."""

    seq_id: int
    operation: Operation
    digest: bytes
    size: int
    """Bytes of its body."""
    acknowledged_failure: str | None
    """The failed request whose failure the client had read when it sent this one."""


def refusal(error: WireError, role: Role = "other") -> Operation:
    """Return an operation that occupies its place in the order and fails."""

    async def run() -> Result:
        raise error

    return Operation(run, role, RequestSource(REFUSED, failed_with(error).body))
