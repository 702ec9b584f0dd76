"""What the hot paths need of ASGI: headers, a bounded body, a streamed body, a short answer."""

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


_BEGINNING_BYTES = 64 << 10
"""Of a body that is too long: what it is about stands there."""


def check_content_encoding(headers: Mapping[str, str], accepted: Collection[str] = ()) -> None:
    """Check that a body comes as it is, or in an encoding that is accepted.

    Raises:
        InvalidRequest: it does not.
    """
    encoding = headers.get("content-encoding", "identity")
    if encoding not in {"identity", *accepted}:
        raise InvalidRequest(
            f"content-encoding {encoding!r} is not accepted: use {' or '.join([*accepted, 'none'])}"
        )


class HotRequest:
    """A request on a hot path; its body is read at most once."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.beginning = b""
        """Of the body, as far as it was read, some chunks at most."""
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }

    async def body(self, max_bytes: int) -> bytes:
        """Return the whole body.

        Raises:
            BodyTooLarge: it is longer than `max_bytes`.
            InvalidRequest: it is compressed.
        """
        check_content_encoding(self.headers)
        chunks, size = [], 0
        async for chunk in self.chunks():
            chunks.append(chunk)
            size += len(chunk)
            if len(self.beginning) < _BEGINNING_BYTES:
                self.beginning += chunk
            if size > max_bytes:
                raise BodyTooLarge(f"body is larger than {max_bytes} bytes")
        return b"".join(chunks)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives.

        Raises:
            InvalidRequest: the client hung up.
        """
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise InvalidRequest("the client hung up before its request was complete")
            if chunk := message.get("body", b""):
                yield chunk
            if not message.get("more_body"):
                return


async def read_prefix(chunks: AsyncIterator[bytes], size: int) -> bytes:
    """Read at least so many bytes, or all there are."""
    beginning = b""
    async for chunk in chunks:
        beginning += chunk
        if len(beginning) >= size:
            break
    return beginning


def decompress_prefix(beginning: bytes, size: int) -> bytes:
    """Return the first bytes of what a zstd stream that begins so holds.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(beginning)) as reader:
            return reader.read(size)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"body is not valid zstd: {error}") from None


async def chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what was read already, and the rest."""
    yield first
    async for chunk in rest:
        yield chunk


@dataclass(frozen=True, slots=True)
class Discard:
    """How much of a body that nobody wants is received all the same, and for how long."""

    max_bytes: int
    max_seconds: float


DISCARD = Discard(256 << 20, 600.0)
DISCARD_WITHOUT_KEY = Discard(8 << 20, 10.0)
"""More than the SDK sends in one request."""
_ONCE = frozenset({b"content-encoding", b"content-type", b"x-api-key"})
"""Headers that must not come twice: readers differ in which one they take."""


def reject_duplicate_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check that no header came twice of which there can be one.

    Raises:
        InvalidRequest: one did.
    """
    names = Counter(name for name, _ in headers if name in _ONCE)
    for name, count in names.items():
        if count > 1:
            raise InvalidRequest(f"{name.decode()}: sent {count} times; send this header once")


def drain_body(
    scope: Scope, receive: Receive, send: Send, discard: Discard
) -> tuple[Receive, Send]:
    """Return a connection's two ends such that no answer is sent before the body was read.

    A client that uploads when its connection is closed sees a reset, not the answer that says
    why; so what nobody wants to read is received and thrown away first, within a bound. Beyond it
    the connection is closed with the answer.
    """
    names = {name for name, _ in scope["headers"]}
    has_more = bool(names & {b"content-length", b"transfer-encoding"})
    discarded = 0

    async def counted() -> MutableMapping[str, Any]:
        nonlocal has_more
        message = await receive()
        has_more = message["type"] == "http.request" and bool(message.get("more_body"))
        return message

    async def late(message: MutableMapping[str, Any]) -> None:
        nonlocal discarded
        with suppress(TimeoutError):
            async with asyncio.timeout(discard.max_seconds):
                while has_more and discarded < discard.max_bytes:
                    discarded += len((await counted()).get("body", b""))
        if has_more and message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return counted, late


async def respond(
    send: Send, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None
) -> None:
    """Send a whole JSON answer. It carries its length: the SDK mistrusts a 400 without one."""
    fields = {"content-type": JSON, "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def respond_error(
    send: Send, error: WireError, headers: Mapping[str, str] | None = None
) -> None:
    """Send what an error becomes."""
    retry = {"retry-after": "1"} if error.status in {429, 503} else {}
    body = orjson.dumps({"detail": error.message})
    await respond(send, body, status=error.status, headers={**retry, **(headers or {})})
