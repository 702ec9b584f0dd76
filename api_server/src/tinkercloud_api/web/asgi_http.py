"""ASGI helpers of the hot paths: headers, bounded and streamed bodies, short JSON responses."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from tinkercloud_protocol.wire import asgi, routes
from tinkercloud_protocol.wire.asgi import Message, Receive, Scope, Send
from tinkercloud_protocol.wire.errors import BodyTooLarge, InvalidRequest, WireError

_PREFIX_BYTES = 64 << 10
"""How much of an oversized body is kept; the fields that identify the request are in it."""


class HotRequest(asgi.Request):
    """A request on a hot path."""

    def __init__(self, scope: Scope, receive: Receive, max_bytes: int) -> None:
        """Wrap a request.

        Args:
            scope: the request (ASGI).
            receive: receives its body (ASGI).
            max_bytes: the limit of a body that is read whole.
        """
        super().__init__(scope, receive)
        self._max_bytes = max_bytes
        self.prefix = b""
        """Start of the body, as far as it was read; a few chunks at most."""

    async def body(self) -> bytes:
        """Return the whole body.

        Raises:
            BodyTooLarge: the body is longer than the limit.
            InvalidRequest: the body is compressed.
        """
        asgi.check_encoding(self.headers)
        chunks, size = [], 0
        async for chunk in self.chunks():
            chunks.append(chunk)
            size += len(chunk)
            if len(self.prefix) < _PREFIX_BYTES:
                self.prefix += chunk
            if size > self._max_bytes:
                raise BodyTooLarge(
                    f"request body: larger than {self._max_bytes} bytes; send less data per request"
                )
        return b"".join(chunks)


async def read_prefix(chunks: AsyncIterator[bytes], size: int) -> bytes:
    """Read at least `size` bytes, or the whole body if it is shorter."""
    prefix = b""
    async for chunk in chunks:
        prefix += chunk
        if len(prefix) >= size:
            break
    return prefix


async def chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the part of a body that was read already, then the rest."""
    yield first
    async for chunk in rest:
        yield chunk


@dataclass(frozen=True, slots=True)
class Discard:
    """Limits for reading an unused body to its end, so that the client sees the response."""

    max_bytes: int
    max_seconds: float


DISCARD = Discard(256 << 20, 600.0)
DISCARD_WITHOUT_KEY = Discard(8 << 20, 10.0)
"""More than the SDK sends in one request."""
_KEY_HEADER = routes.API_KEY_HEADER.encode()
_BEARER = "bearer "
_ONCE = frozenset({b"authorization", b"content-encoding", b"content-type", _KEY_HEADER})
"""Headers that must not be repeated: HTTP implementations differ in which value they use."""


def reject_duplicate_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check that headers with a single value were sent once.

    Raises:
        InvalidRequest: one was repeated.
    """
    names = [name for name, _ in headers if name in _ONCE]
    if len(set(names)) == len(names):
        return
    name, count = Counter(names).most_common(1)[0]
    raise InvalidRequest(f"{name.decode()}: sent {count} times; send this header once")


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the API key in a request's headers: `X-API-Key: KEY` or `Authorization: Bearer KEY`.

    Other schemes of Authorization are ignored: proxies in front of the server use them.

    Raises:
        InvalidRequest: both headers are present, with different keys.
    """
    fields = {name: value.decode("latin-1") for name, value in headers}
    key, authorization = fields.get(_KEY_HEADER, ""), fields.get(b"authorization", "")
    bearer = ""
    if authorization[: len(_BEARER)].lower() == _BEARER:
        bearer = authorization[len(_BEARER) :].strip()
    if key and bearer and key != bearer:
        raise InvalidRequest(
            "x-api-key, authorization: the two headers contain different keys; send one of them"
        )
    return key or bearer or None


def drain_body(
    scope: Scope, receive: Receive, send: Send, discard: Discard
) -> tuple[Receive, Send]:
    """Wrap `receive` and `send` so that the body is read before the response is sent.

    A client whose connection is closed while it uploads sees a reset instead of the response. The
    rest of the body is therefore received and discarded first, up to a limit. Beyond the limit, the
    connection is closed together with the response.
    """
    names = {name for name, _ in scope["headers"]}
    has_more = bool(names & {b"content-length", b"transfer-encoding"})
    discarded = 0

    async def receive_tracked() -> Message:
        nonlocal has_more
        message = await receive()
        has_more = message["type"] == "http.request" and bool(message.get("more_body"))
        return message

    async def discard_rest() -> None:
        nonlocal discarded
        with suppress(TimeoutError):
            async with asyncio.timeout(discard.max_seconds):
                while has_more and discarded < discard.max_bytes:
                    discarded += len((await receive_tracked()).get("body", b""))

    async def send_after_body(message: Message) -> None:
        if has_more:
            await discard_rest()
        if has_more and message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return receive_tracked, send_after_body


async def respond_error(
    send: Send, error: WireError, headers: Mapping[str, str] | None = None
) -> None:
    """Send the response to an error."""
    fields = {**asgi.error_headers(error), **(headers or {})}
    await asgi.respond(send, asgi.error_body(error), status=error.status, headers=fields)
