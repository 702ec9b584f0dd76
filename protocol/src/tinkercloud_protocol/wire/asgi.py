"""Bare ASGI for large bodies, shared by the API server's hot paths and the head.

Nothing between the socket and the parser copies a body or decides what an error looks like.
"""

import asyncio
import io
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

import orjson
import zstandard

from tinkercloud_protocol.wire.errors import InvalidRequest, MethodNotAllowed, WireError
from tinkercloud_protocol.wire.future_responses import JSON

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Request:
    """An HTTP request whose body is read at most once."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }

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

    async def wait_until_disconnected(self) -> None:
        """Return once the client has disconnected, after the whole body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def run_until_disconnected(self, work: Awaitable[None]) -> bool:
        """Run work until the client disconnects, which cancels it; return whether it was finished.

        As `wait_until_disconnected`, only after the whole body was read.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.create_task(self.wait_until_disconnected())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            await task
            return True
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.gather(gone, task, return_exceptions=True)


def check_encoding(headers: Mapping[str, str], accepted: Collection[str] = ()) -> None:
    """Check that a body is not compressed, or has an accepted encoding.

    Raises:
        InvalidRequest: it has another encoding.
    """
    encoding = headers.get("content-encoding", "identity")
    if encoding not in {"identity", *accepted}:
        raise InvalidRequest(
            f"Content-Encoding: {encoding!r} is not supported; use"
            f" {' or '.join([*accepted, 'none'])}"
        )


def decompress(compressed: bytes, max_bytes: int) -> bytes:
    """Return the first bytes of the content of a zstd stream, which may be incomplete.

    The stream is read step by step: decompressing it in one call trusts the size that it declares.

    Raises:
        InvalidRequest: it is not a zstd stream.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(compressed)) as reader:
            return reader.read(max_bytes)
    except zstandard.ZstdError as error:
        raise InvalidRequest(
            f"request body: not valid zstd ({error}); compress it again, or send it uncompressed"
        ) from None


def error_headers(error: WireError) -> dict[str, str]:
    """Return the headers of the answer that an error becomes, which depend on its kind."""
    headers = {"retry-after": "1"} if error.status in {429, 503} else {}
    return headers | ({"allow": error.allowed} if isinstance(error, MethodNotAllowed) else {})


def error_body(error: WireError) -> bytes:
    """Return the body of the answer that an error becomes."""
    return orjson.dumps({"detail": error.message})


async def respond(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    content_type: str = JSON,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a complete answer with its length; the SDK does not trust a 400 without one."""
    fields = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
