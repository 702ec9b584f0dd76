"""Headers of requests to a head, and what they mean."""

from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.head.wire.head_http import Request

MAX_KEY_CHARACTERS = 256
"""Maximum length of an idempotency key."""


def idempotency_key(request: Request) -> str | None:
    """Return the idempotency key of a request without a number, if it has one.

    Raises:
        InvalidRequest: it is empty or too long.
    """
    key = request.headers.get(routes.IDEMPOTENCY_HEADER)
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidRequest(
            f"{routes.IDEMPOTENCY_HEADER}: must have 1 to {MAX_KEY_CHARACTERS} characters, got"
            f" {len(key)}"
        )
    return key


def is_peek(request: Request) -> bool:
    """Return whether the result that a request asks for does not count as read."""
    return routes.PEEK_HEADER in request.headers


def seconds_to_wait(request: Request) -> float | None:
    """Return how long a request waits for a result; None means as long as a long poll.

    Raises:
        InvalidRequest: the header has no number.
    """
    asked = request.headers.get(routes.WAIT_HEADER)
    if asked is None:
        return None
    try:
        return max(float(asked), 0.0)
    except ValueError:
        raise InvalidRequest(
            f"{routes.WAIT_HEADER}: must be a number of seconds, got {asked!r}"
        ) from None
