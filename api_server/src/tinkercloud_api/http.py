"""HTTP of the API server's hot paths: bounded bodies, streamed bodies, and answers to errors."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from tinkercloud_protocol import asgi
from tinkercloud_protocol.asgi import Message, Receive, Scope, Send
from tinkercloud_protocol.errors import BodyTooLarge, InvalidRequest, WireError

_BEGINNING_BYTES = 64 << 10
"""How much of a body is kept when the body is too long: it names what the request is about."""


class HotRequest(asgi.Request):
    """A request on a hot path."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.beginning = b""
        """Beginning of the body as far as it has been read, at most a few chunks."""

    async def body(self, max_bytes: int) -> bytes:
        """Return the whole body.

        Raises:
            BodyTooLarge: it is longer than `max_bytes`.
            InvalidRequest: it is compressed.
        """
        asgi.check_encoding(self.headers)
        chunks, size = [], 0
        async for chunk in self.chunks():
            chunks.append(chunk)
            size += len(chunk)
            if len(self.beginning) < _BEGINNING_BYTES:
                self.beginning += chunk
            if size > max_bytes:
                raise BodyTooLarge(f"body is larger than {max_bytes} bytes")
        return b"".join(chunks)


async def beginning_of(chunks: AsyncIterator[bytes], size: int) -> bytes:
    """Read at least `size` bytes, or everything if there are fewer."""
    beginning = b""
    async for chunk in chunks:
        beginning += chunk
        if len(beginning) >= size:
            break
    return beginning


async def chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what has been read already, then the rest."""
    yield first
    async for chunk in rest:
        yield chunk


@dataclass(frozen=True, slots=True)
class Discard:
    """How much of an unwanted body is received anyway, and for how long."""

    max_bytes: int
    max_seconds: float


DISCARD = Discard(256 << 20, 600.0)
DISCARD_WITHOUT_KEY = Discard(8 << 20, 10.0)
"""More than the SDK sends in one request."""
_ONCE = frozenset({b"content-encoding", b"content-type", b"x-api-key"})
"""Headers that must not be repeated: readers differ in which one they use."""


def check_repeated_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check that no header is repeated that may occur only once.

    Raises:
        InvalidRequest: one is.
    """
    names = Counter(name for name, _ in headers if name in _ONCE)
    for name, count in names.items():
        if count > 1:
            raise InvalidRequest(f"{name.decode()}: sent {count} times; send this header once")


def drain_before_answering(
    scope: Scope, receive: Receive, send: Send, discard: Discard
) -> tuple[Receive, Send]:
    """Wrap a connection so that no answer is sent before the body has been read.

    A client that is still uploading when its connection is closed sees a reset instead of the
    answer. So the rest of an unwanted body is received and discarded first, within a bound. Beyond
    that bound the connection is closed together with the answer.
    """
    names = {name for name, _ in scope["headers"]}
    has_more = bool(names & {b"content-length", b"transfer-encoding"})
    discarded = 0

    async def counted() -> Message:
        nonlocal has_more
        message = await receive()
        has_more = message["type"] == "http.request" and bool(message.get("more_body"))
        return message

    async def late(message: Message) -> None:
        nonlocal discarded
        with suppress(TimeoutError):
            async with asyncio.timeout(discard.max_seconds):
                while has_more and discarded < discard.max_bytes:
                    discarded += len((await counted()).get("body", b""))
        if has_more and message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return counted, late


async def answer_error(
    send: Send, error: WireError, headers: Mapping[str, str] | None = None
) -> None:
    """Send the answer that an error becomes."""
    retry = {"retry-after": "1"} if error.status in {429, 503} else {}
    await asgi.respond(
        send, asgi.error_body(error), status=error.status, headers={**retry, **(headers or {})}
    )
