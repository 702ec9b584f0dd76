"""Errors that reach a client, and what each becomes on the wire.

    WireError                 status  what the SDK does with it on submit
    ├── InvalidRequest        400     raises BadRequestError at once
    ├── Unauthenticated       401     raises AuthenticationError at once
    ├── Forbidden             403     raises PermissionDeniedError at once
    ├── NotFound              404     raises NotFoundError at once
    ├── StateLost             410     raises at once (training); see below for sampling
    ├── ResultGone            410     never on submit; see below
    ├── BodyTooLarge          413     raises at once
    ├── Overloaded            429     retries with back-off for up to five minutes
    └── Unavailable           503     retries with back-off for up to five minutes

A request that was accepted and then fails has no status of its own: its future is answered with
HTTP 200 and `{"error", "category"}` (`futures.failed`), because the SDK retries every 5xx, 408,
409 and 429 of `retrieve_future` for ever. For the same reason 409 is never used: the SDK would
repeat a refused request for five minutes. On a 410 for a sample the SDK sends it again, without
end: only `retrieve_future` answers it, for a sample whose result is gone and which can be drawn
again (`routes/hot.py` of the API server, and the head for sessions that it serves). What can never
be drawn again is a failed future.

Messages name the field, what came, what is accepted and what to do.
"""

from typing import ClassVar, Literal

Category = Literal["user", "server", "unknown"]


class WireError(Exception):
    """An error with a place on the wire. `category` says whose it is, for futures."""

    status: ClassVar[int] = 500
    category: ClassVar[Category] = "server"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(WireError):
    """The request cannot be right, whenever it is sent."""

    status = 400
    category = "user"


class Unauthenticated(WireError):
    """No key, or one that is unknown or revoked."""

    status = 401
    category = "user"


class Forbidden(WireError):
    """The key's role does not allow this."""

    status = 403
    category = "user"


class NotFound(WireError):
    """It does not exist, or belongs to somebody else: a client can't tell which."""

    status = 404
    category = "user"


class StateLost(WireError):
    """The state the request builds on died with its process; a checkpoint may hold an older one."""

    status = 410
    category = "server"


class ResultGone(WireError):
    """A sample's result is no longer kept; the sample can be drawn again."""

    status = 410
    category = "server"


class BodyTooLarge(WireError):
    """The body is over the limit, before or after decompression."""

    status = 413
    category = "user"


class Overloaded(WireError):
    """A bounded queue is full."""

    status = 429
    category = "server"


class Unavailable(WireError):
    """A part of the service is starting or unreachable: the same request may succeed later."""

    status = 503
    category = "server"
