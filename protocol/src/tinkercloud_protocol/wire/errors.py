"""Errors that reach a client, and their representation on the wire.

    WireError                 status  reaction of the SDK on submission
    ├── InvalidRequest        400     raises BadRequestError at once
    ├── Unauthenticated       401     raises AuthenticationError at once
    ├── NotFound              404     raises NotFoundError at once
    ├── MethodNotAllowed      405     raises at once
    ├── StateLost             410     raises at once (training); see below for sampling
    ├── ResultGone            410     never on submission; see below
    ├── BodyTooLarge          413     raises at once
    ├── Overloaded            429     retries with back-off for up to five minutes
    └── Unavailable           503     retries with back-off for up to five minutes

If an accepted request fails later, the response to its future has status 200 and the body
`{"error", "category"}` (`future_responses.failed`), because the SDK retries 5xx, 408, 409 and 429
responses of `retrieve_future` indefinitely. For the same reason 409 is never used: the SDK would
repeat a rejected request for five minutes. After a 410 response for a sample the SDK sends the
sampling request again, without limit. So only `retrieve_future` returns it, for a sample whose
result is gone and which can be sampled again; a sample that cannot becomes a failed future.

Messages name the field, the value received, the accepted values and what to do.
"""

from collections.abc import Collection
from typing import ClassVar, Literal

Category = Literal["user", "server", "unknown"]


class WireError(Exception):
    """An error with a status on the wire. `category` says who caused it, for futures."""

    status: ClassVar[int] = 500
    category: ClassVar[Category] = "server"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(WireError):
    """The request is invalid, and will be rejected whenever it is sent."""

    status = 400
    category = "user"


class ContextLengthExceeded(InvalidRequest):
    """A prompt has more tokens than the model reads."""

    def __init__(self, field: str, num_tokens: int | str, max_tokens: int) -> None:
        """Create the error.

        Args:
            field: the field of the request that has the prompt.
            num_tokens: its number of tokens; text such as "at least 9000" if it was not counted.
            max_tokens: the context length of the model.
        """
        super().__init__(
            f"{field}: {num_tokens} tokens exceed this model's maximum context length of"
            f" {max_tokens} tokens; shorten the prompt"
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class Unauthenticated(WireError):
    """The request has no API key, or one that is unknown or revoked."""

    status = 401
    category = "user"


class Forbidden(WireError):
    """The API key has no right to send this request at all."""

    status = 403
    category = "user"


class NotFound(WireError):
    """The object does not exist or belongs to another owner; clients cannot tell which."""

    status = 404
    category = "user"


class MethodNotAllowed(WireError):
    """The path is served, but not with this method."""

    status = 405
    category = "user"

    def __init__(self, method: str, path: str, allowed: Collection[str]) -> None:
        """Create the error.

        Args:
            method: the method of the request.
            path: its path.
            allowed: the methods that are served at this path.
        """
        self.allowed = ", ".join(sorted(allowed))
        super().__init__(
            f"{method} {path[:256]} is not supported by this server; send {self.allowed}"
        )


class StateLost(WireError):
    """The state that the request depends on was lost with its process."""

    status = 410
    category = "server"


class ResultGone(WireError):
    """A sample's result is no longer kept; it can be sampled again."""

    status = 410
    category = "server"


class BodyTooLarge(WireError):
    """The body exceeds the limit, before or after decompression."""

    status = 413
    category = "user"


class Overloaded(WireError):
    """A bounded queue is full."""

    status = 429
    category = "server"


class Unavailable(WireError):
    """A part of the service is starting or unreachable; the same request may succeed later."""

    status = 503
    category = "server"
