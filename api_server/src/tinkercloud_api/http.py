"""ASGI helpers of the hot paths: headers, bounded and streamed bodies, short JSON responses."""

import asyncio
import io
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
)
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
import zstandard

from tinkercloud_protocol.errors import BodyTooLarge, InvalidRequest, WireError
from tinkercloud_protocol.futures import JSON

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


_PREFIX_BYTES = 64 << 10
"""How much of an oversized body is kept; the fields that identify the request are in it."""


def check_content_encoding(headers: Mapping[str, str], accepted: Collection[str] = ()) -> None:
    """Check that a body is not encoded, or is in an accepted encoding.

    Raises:
        InvalidRequest: the encoding is not accepted.
    """
    encoding = headers.get("content-encoding", "identity")
    if encoding not in {"identity", *accepted}:
        raise InvalidRequest(
            f"content-encoding: {encoding!r} is not accepted; use"
            f" {' or '.join([*accepted, 'none'])}"
        )


class HotRequest:
    """A request on a hot path; its body is read at most once."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.prefix = b""
        """Start of the body, as far as it was read; a few chunks at most."""
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }

    async def body(self, max_bytes: int) -> bytes:
        """Return the whole body.

        Raises:
            BodyTooLarge: the body is longer than `max_bytes`.
            InvalidRequest: the body is compressed.
        """
        check_content_encoding(self.headers)
        chunks, size = [], 0
        async for chunk in self.chunks():
            chunks.append(chunk)
            size += len(chunk)
            if len(self.prefix) < _PREFIX_BYTES:
                self.prefix += chunk
            if size > max_bytes:
                raise BodyTooLarge(f"body is larger than {max_bytes} bytes")
        return b"".join(chunks)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives.

        Raises:
            InvalidRequest: the client disconnected.
        """
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise InvalidRequest("the client disconnected before its request was complete")
            if chunk := message.get("body", b""):
                yield chunk
            if not message.get("more_body"):
                return


async def read_prefix(chunks: AsyncIterator[bytes], size: int) -> bytes:
    """Read at least `size` bytes, or the whole body if it is shorter."""
    prefix = b""
    async for chunk in chunks:
        prefix += chunk
        if len(prefix) >= size:
            break
    return prefix


def decompress_prefix(prefix: bytes, size: int) -> bytes:
    """Decompress the first `size` bytes of a zstd stream from its first bytes.

    Raises:
        InvalidRequest: the stream is not valid zstd.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(prefix)) as reader:
            return reader.read(size)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"body is not valid zstd: {error}") from None


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
_ONCE = frozenset({b"content-encoding", b"content-type", b"x-api-key"})
"""Headers that must not be repeated: HTTP implementations differ in which value they use."""


def reject_duplicate_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check that headers with a single value were sent once.

    Raises:
        InvalidRequest: one was repeated.
    """
    names = Counter(name for name, _ in headers if name in _ONCE)
    for name, count in names.items():
        if count > 1:
            raise InvalidRequest(f"{name.decode()}: sent {count} times; send this header once")


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

    async def receive_tracked() -> MutableMapping[str, Any]:
        nonlocal has_more
        message = await receive()
        has_more = message["type"] == "http.request" and bool(message.get("more_body"))
        return message

    async def send_after_body(message: MutableMapping[str, Any]) -> None:
        nonlocal discarded
        with suppress(TimeoutError):
            async with asyncio.timeout(discard.max_seconds):
                while has_more and discarded < discard.max_bytes:
                    discarded += len((await receive_tracked()).get("body", b""))
        if has_more and message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return receive_tracked, send_after_body


async def respond(
    send: Send, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """Send a JSON response. Its length is stated: the SDK retries a 400 without a length."""
    fields = {"content-type": JSON, "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def respond_error(
    send: Send, error: WireError, headers: Mapping[str, str] | None = None
) -> None:
    """Send the response to an error."""
    retry = {"retry-after": "1"} if error.status in {429, 503} else {}
    body = orjson.dumps({"detail": error.message})
    await respond(send, body, status=error.status, headers={**retry, **(headers or {})})
