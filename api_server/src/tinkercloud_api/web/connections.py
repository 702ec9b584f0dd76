"""Limits of client connections: their number, and the size and speed of request headers.

uvicorn's httptools protocol has none of these limits. Its h11 protocol limits the size of headers
only, and takes twice as long for a small call.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinkercloud_protocol.wire.asgi import Receive, Scope, Send, respond
from tinkercloud_protocol.wire.errors import Unavailable

MAX_HEAD_BYTES = 64 << 10
"""Size limit of a request line and its headers."""
MAX_HEADERS = 100
HEAD_SECONDS = 20.0
"""Time limit for receiving the headers, from their first byte or from the connection's start."""
BODY_IDLE_SECONDS = 60.0
"""Time limit without any byte of a body that is being read, up to twice that after a pause."""
_DESCRIPTORS_OF_OTHERS = 256
"""File descriptors that are not client connections: files, the catalog, child processes."""
_DESCRIPTORS_OF_ONE = 2
"""Each client connection may need a connection to a head as well."""
_REFUSED_AT_ONCE = 1.1
"""Multiple of the connection limit beyond which connections are closed without a response."""

App = Callable[[Scope, Receive, Send], Any]


def default_bound(num_descriptors: int) -> int:
    """Return the default limit of client connections for a number of file descriptors."""
    return max(16, (num_descriptors - _DESCRIPTORS_OF_OTHERS) // _DESCRIPTORS_OF_ONE)


def bounded(max_connections: int) -> type[asyncio.Protocol]:
    """Return a protocol class with this limit, which uvicorn instantiates for each connection."""

    class Bounded(BoundedProtocol):
        bound = max_connections

    return Bounded


class BoundedProtocol(HttpToolsProtocol):
    """A client connection. Requests over a limit receive an error status and are closed."""

    bound: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request if the number of connections is below the limit."""
        super().connection_made(transport)
        self._served = self.app
        self._is_in_head = True
        self._head_bytes = 0
        self._last_byte = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_surplus = len(self.connections) > self.bound
        if len(self.connections) > self.bound * _REFUSED_AT_ONCE:
            transport.abort()
            return
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes from the client."""
        self._last_byte = self.loop.time()
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Start the timer for the rest of the headers."""
        super().on_message_begin()
        if self._timer is None:
            self._time_head()

    def on_headers_complete(self) -> None:
        """Serve or reject a request."""
        self._is_in_head, self._head_bytes = False, 0
        self._stop_timer()
        self.app = cast("Any", self._rejection() or self._served)
        super().on_headers_complete()
        self._timer = self.loop.call_later(BODY_IDLE_SECONDS, self._check_body)

    def on_message_complete(self) -> None:
        """Prepare for the headers of another request."""
        super().on_message_complete()
        self._stop_timer()
        self._is_in_head, self._head_bytes = True, 0

    def _rejection(self) -> App | None:
        if self._is_surplus:
            return _too_many
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        is_too_large = size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS
        return _head_too_large if is_too_large else None

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a request for a protocol upgrade is served as a normal request."""

    def _time_head(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close)

    def _check_body(self) -> None:
        """Close the connection if a body that is being read has stalled."""
        now = self.loop.time()
        if self.flow.read_paused:
            # Reading may resume just before the next check, and the client has its time from then.
            self._last_byte = now + BODY_IDLE_SECONDS
        waited = now - self._last_byte
        if waited >= BODY_IDLE_SECONDS:
            self._close()
        else:
            self._timer = self.loop.call_later(BODY_IDLE_SECONDS - waited, self._check_body)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self.transport.close()


def _detail(message: str) -> bytes:
    return orjson.dumps({"detail": message})


_LARGE = _detail(
    f"request headers are too large: at most {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes are"
    " accepted"
)
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_LARGE), _LARGE)
)


async def _head_too_large(_scope: Scope, _receive: Receive, send: Send) -> None:
    await respond(send, _LARGE, status=431, headers={"connection": "close"})


async def _too_many(_scope: Scope, _receive: Receive, send: Send) -> None:
    body = _detail("the server has reached its connection limit (max_connections); try again later")
    headers = {"retry-after": "1", "connection": "close"}
    await respond(send, body, status=Unavailable.status, headers=headers)
