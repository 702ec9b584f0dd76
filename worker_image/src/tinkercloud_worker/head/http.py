"""Just enough ASGI for the head: bounded bodies in, bytes out.

The head speaks bare ASGI because its requests are large and few kinds: nothing between the socket
and the parser copies a body or decides on its own what an error looks like.
"""

import asyncio
import io
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import zstandard

from tinkercloud_protocol.errors import BodyTooLarge, InvalidRequest, WireError
from tinkercloud_protocol.futures import JSON

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LARGE_BODY_BYTES = 64 << 10
"""From here on, reading a body takes longer than the event loop should be held."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. Every answer carries its length: the SDK mistrusts a 400 without one."""

    body: bytes = b"{}"
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)

    async def send(self, send: Send) -> None:
        """Write the answer to the connection."""
        headers = {
            "content-type": self.content_type,
            "content-length": str(len(self.body)),
            **self.headers,
        }
        await send(
            {
                "type": "http.response.start",
                "status": self.status,
                "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            }
        )
        await send({"type": "http.response.body", "body": self.body})


def error_response(error: WireError) -> Response:
    """Return the answer that an error becomes."""
    headers = {"retry-after": "1"} if error.status == 429 else {}
    return Response(orjson.dumps({"detail": error.message}), error.status, headers=headers)


class Request:
    """One HTTP request."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self._prefix = b""

    def body_bytes(self, max_bytes: int) -> int:
        """Return how long the body may be once it is decompressed, before it is received."""
        declared = self.headers.get("content-length", "")
        is_plain = self.headers.get("content-encoding", "identity") == "identity"
        return int(declared) if is_plain and declared.isdecimal() else max_bytes

    def plain_prefix(self, max_bytes: int) -> bytes:
        """Return the beginning of the body, decompressed, as far as `body` has come."""
        if self.headers.get("content-encoding") != "zstd":
            return self._prefix[:max_bytes]
        try:
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(self._prefix)) as reader:
                return reader.read(max_bytes)
        except zstandard.ZstdError:
            return b""

    async def body(self, max_bytes: int) -> bytes:
        """Return the body, decompressed if it came so.

        Raises:
            BodyTooLarge: it is longer than `max_bytes`, before or after decompression.
            InvalidRequest: the client hung up, or the encoding is unknown or wrong.
        """
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise InvalidRequest("the client hung up before its request was complete")
            chunk = message.get("body", b"")
            if not chunks:
                self._prefix = chunk
            chunks.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            if not message.get("more_body"):
                break
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        encoding = self.headers.get("content-encoding", "identity")
        if encoding == "identity":
            return body
        if encoding == "zstd":
            return await asyncio.to_thread(_decompress, body, max_bytes)
        raise InvalidRequest(f"content-encoding {encoding!r} is not accepted: use zstd or none")


def _decompress(body: bytes, max_bytes: int) -> bytes:
    # Read as a stream: the one-shot call trusts the size a frame declares.
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as reader:
            content = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"body is not valid zstd: {error}") from None
    if len(content) > max_bytes:
        raise _too_large(max_bytes)
    return content


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"body is larger than {max_bytes} bytes: send less data in one request (the SDK's own"
        " limit is 5 MB a chunk)"
    )
