"""HTTP of the head: bounded bodies in, bytes out.

The head speaks bare ASGI because its requests are large and of few kinds.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property

from tinkercloud_protocol.wire import asgi, recorded_paths, routes
from tinkercloud_protocol.wire.asgi import Receive, Scope, Send
from tinkercloud_protocol.wire.errors import BodyTooLarge, InvalidRequest, WireError
from tinkercloud_protocol.wire.future_responses import JSON
from tinkercloud_protocol.wire.recorded_paths import RecordedPath

_MAX_KEY_CHARACTERS = 256
LARGE_BODY_BYTES = 64 << 10
"""Bodies of this size and above take longer to parse than the event loop may be blocked."""


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer."""

    body: bytes = b"{}"
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)

    async def send(self, send: Send) -> None:
        """Write the answer to the connection."""
        await asgi.respond(
            send,
            self.body,
            status=self.status,
            content_type=self.content_type,
            headers=self.headers,
        )


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer that is sent in parts."""

    send: Callable[[Send], Awaitable[None]]
    """Sends all of it."""


def error_response(error: WireError) -> Response:
    """Return the answer that an error becomes."""
    # After a 503, clients wait longer from try to try, as a head takes its time to start.
    headers = asgi.error_headers(error) if error.status != 503 else {}
    return Response(asgi.error_body(error), error.status, headers=headers)


class Request(asgi.Request):
    """A request whose body may be compressed with zstd."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self._prefix = b""
        self.max_bytes = 0
        """Limit of the body: that of its route."""

    @cached_property
    def recorded(self) -> RecordedPath | None:
        """The parts of the path; None if it is not that of a recorded session."""
        return recorded_paths.parse(self.path)

    @property
    def idempotency_key(self) -> str | None:
        """The idempotency key of a request without a number, if it has one.

        Raises:
            InvalidRequest: it is empty or too long.
        """
        key = self.headers.get(routes.IDEMPOTENCY_HEADER)
        if key is not None and not 0 < len(key) <= _MAX_KEY_CHARACTERS:
            raise InvalidRequest(
                f"{routes.IDEMPOTENCY_HEADER}: must have 1 to {_MAX_KEY_CHARACTERS} characters,"
                f" got {len(key)}"
            )
        return key

    @property
    def is_peek(self) -> bool:
        """Whether the result that it asks for does not count as read."""
        return routes.PEEK_HEADER in self.headers

    @property
    def seconds_to_wait(self) -> float | None:
        """How long it waits for a result; None means as long as a long poll.

        Raises:
            InvalidRequest: the header has no number.
        """
        asked = self.headers.get(routes.WAIT_HEADER)
        if asked is None:
            return None
        try:
            return max(float(asked), 0.0)
        except ValueError:
            raise InvalidRequest(
                f"{routes.WAIT_HEADER}: must be a number of seconds, got {asked!r}"
            ) from None

    def body_bytes(self) -> int:
        """Return an upper bound of the decompressed body's size, before it is received."""
        declared = self.headers.get("content-length", "")
        is_plain = self.headers.get("content-encoding", "identity") == "identity"
        return int(declared) if is_plain and declared.isdecimal() else self.max_bytes

    def plain_prefix(self, max_bytes: int) -> bytes:
        """Return the beginning of the body, decompressed, as far as `body` has read it."""
        if self.headers.get("content-encoding") != "zstd":
            return self._prefix[:max_bytes]
        try:
            return asgi.decompress(self._prefix, max_bytes)
        except InvalidRequest:
            return b""

    async def body(self) -> bytes:
        """Return the body, decompressed.

        Raises:
            BodyTooLarge: it is longer than the limit, before or after decompression.
            InvalidRequest: the client disconnected, or the encoding is unknown or wrong.
        """
        chunks: list[bytes] = []
        size = 0
        async for chunk in self.chunks():
            if not chunks:
                self._prefix = chunk
            chunks.append(chunk)
            size += len(chunk)
            if size > self.max_bytes:
                raise _too_large(self.max_bytes)
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        asgi.check_encoding(self.headers, accepted=("zstd",))
        if self.headers.get("content-encoding") == "zstd":
            return await asyncio.to_thread(_decompress, body, self.max_bytes)
        return body


def _decompress(body: bytes, max_bytes: int) -> bytes:
    content = asgi.decompress(body, max_bytes + 1)
    if len(content) > max_bytes:
        raise _too_large(max_bytes)
    return content


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"request body: larger than {max_bytes} bytes; send less data per request (the SDK"
        " limits its chunks to 5 MB)"
    )
