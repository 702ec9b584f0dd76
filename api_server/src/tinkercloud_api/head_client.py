"""HTTP/1.1 to session heads, with as little between the sockets as can be.

Every training step passes through here, so this is not a general client: one kind of request
(POST), kept-alive connections, no redirects, cookies or compression. Responses are parsed by
httptools as they arrive and handed on chunk by chunk; reading stops while the other side is slow,
and so does writing. A general client took three times as long for a small call
(`benchmarks/service.py`, C16).
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools

Headers = Sequence[tuple[bytes, bytes]]

_BUFFERED_BYTES = 256 << 10
"""Of one response, before reading from the head is paused."""
_CONNECT_SECONDS = 5.0
_KEEPALIVE = {
    "TCP_KEEPIDLE": 30,
    # What macOS calls the same.
    "TCP_KEEPALIVE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
}
"""Break connections within a minute of silence from a machine; systems lack some of these."""
_IDLE_SECONDS = 30.0
"""Less than the head keeps an idle connection open (75 s), so that none is used as it closes."""


class HeadUnreachable(ConnectionError):
    """The head can't be connected to, is silent, or hung up before its answer was complete."""


class _Connection(asyncio.Protocol):
    """One connection: one request at a time."""

    def __init__(self, on_lost: "Callable[[_Connection], None]") -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._is_sent = False
        self._is_complete = False
        self._keeps_alive = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def has_answered(self) -> bool:
        """Whether the answer's status and headers have come."""
        return self.status != 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _keep_alive(transport.get_extra_info("socket"))

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self._on_lost(self)
        self._can_write.set()
        self._wake()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > _BUFFERED_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_complete = True
        self._keeps_alive = self._parser.should_keep_alive()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if not self.is_open:
            raise HeadUnreachable("the session head hung up")
        self._waiter = self._loop.create_future()
        await self._waiter

    async def send(
        self, head: bytes, body: bytes | AsyncIterator[bytes], silence_seconds: float
    ) -> None:
        """Write a request, and wait for the status and headers of its answer.

        Raises:
            HeadUnreachable: the head hung up, or for so long takes nothing or does not answer. How
                long a streamed body takes to arrive here does not count.
        """
        self._reset()
        try:
            if isinstance(body, bytes):
                self._write(head + body)
                self._is_sent = True
            else:
                self._write(head)
                self._is_sent = await self._stream(body, silence_seconds)
            async with asyncio.timeout(silence_seconds):
                while not self.has_answered:
                    await self._wait()
        except TimeoutError:
            raise HeadUnreachable(
                f"the session head was silent for {silence_seconds:g} s"
            ) from None

    async def _stream(self, body: AsyncIterator[bytes], silence_seconds: float) -> bool:
        """Write a body as it arrives; return whether it was wanted to its end."""
        async for chunk in body:
            async with asyncio.timeout(silence_seconds):
                await self._can_write.wait()
            if self.has_answered or not self.is_open:
                return False
            self._write(chunk)
        return True

    def _write(self, data: bytes) -> None:
        if self._transport is None:
            raise HeadUnreachable("the session head hung up")
        self._transport.write(data)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the answer's body as it arrives."""
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._buffered -= len(chunk)
                yield chunk
            if self._is_complete:
                return
            if self._transport is not None:
                self._transport.resume_reading()
            await self._wait()

    @property
    def is_reusable(self) -> bool:
        """Whether nothing of this request or its answer is left on the connection."""
        is_clean = self._is_sent and self._is_complete
        return is_clean and self.is_open and self._keeps_alive

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()


class HeadResponse:
    """A head's answer. Use it as a context: its connection goes back to the pool afterwards."""

    def __init__(self, client: "HeadClient", authority: str, connection: _Connection) -> None:
        self._client = client
        self._authority = authority
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    async def __aenter__(self) -> "HeadResponse":
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._client.give_back(self._authority, self._connection)

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Raises:
            HeadUnreachable: the head hung up before the end.
        """
        return self._connection.chunks()


class HeadClient:
    """Connections to heads, kept open between requests. Belongs to one event loop."""

    def __init__(self) -> None:
        self._idle: dict[str, dict[_Connection, None]] = {}
        """By authority, those that were used last at the end; no authority without any."""

    async def post(
        self,
        url: str,
        headers: Headers,
        body: bytes | AsyncIterator[bytes],
        *,
        silence_seconds: float,
    ) -> HeadResponse:
        """Send a request and return its answer, of which status and headers have come.

        Args:
            url: `http://host:port/path`.
            headers: besides Host; one of them gives the body's length if it is known.
            body: whole, or as it arrives.
            silence_seconds: how long the head may take to begin its answer to all of the request,
                and to take more of its body.

        Raises:
            HeadUnreachable: the head can't be connected to, is silent for longer, or hung up before
                it answered.
        """
        parts = urlsplit(url)
        fields = [(b"host", parts.netloc.encode()), *headers]
        if isinstance(body, bytes):
            fields.append((b"content-length", str(len(body)).encode()))
        elif not any(name == b"content-length" for name, _ in headers):
            fields.append((b"transfer-encoding", b"chunked"))
            body = _chunked(body)
        lines = b"".join(b"%b: %b\r\n" % field for field in fields)
        head = b"POST %b HTTP/1.1\r\n%b\r\n" % (parts.path.encode(), lines)
        connection = await self._connection(parts.netloc)
        try:
            await connection.send(head, body, silence_seconds)
        except BaseException:
            connection.close()
            raise
        return HeadResponse(self, parts.netloc, connection)

    async def _connection(self, authority: str) -> _Connection:
        loop = asyncio.get_running_loop()
        while (connection := self._take_idle(authority)) is not None:
            if connection.is_open and loop.time() - connection.idle_since < _IDLE_SECONDS:
                return connection
            connection.close()
        host, _, port = authority.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, made = await loop.create_connection(
                    lambda: _Connection(lambda lost: self._forget(authority, lost)),
                    host.strip("[]"),
                    int(port),
                )
        except TimeoutError:
            raise HeadUnreachable(
                f"the session head can't be reached: no answer in {_CONNECT_SECONDS:g} s"
            ) from None
        except OSError as error:
            raise HeadUnreachable(f"the session head can't be reached: {error}") from None
        return made

    def _take_idle(self, authority: str) -> _Connection | None:
        """Return the idle connection that was used last, which then is idle no more."""
        connection = next(reversed(self._idle.get(authority, {})), None)
        if connection is not None:
            self._forget(authority, connection)
        return connection

    def _forget(self, authority: str, connection: _Connection) -> None:
        idle = self._idle.get(authority, {})
        if connection in idle:
            del idle[connection]
            if not idle:
                del self._idle[authority]

    def give_back(self, authority: str, connection: _Connection) -> None:
        """Keep a connection for the next request, if it can serve one."""
        if connection.is_reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.setdefault(authority, {})[connection] = None
        else:
            connection.close()

    @property
    def num_idle(self) -> int:
        """Connections that are kept for the next request."""
        return sum(map(len, self._idle.values()))

    def close(self) -> None:
        """Close all idle connections."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()


def _keep_alive(made: socket.socket) -> None:
    """Have a socket notice when the machine at its other end is gone."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)


async def _chunked(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in body:
        yield b"%x\r\n%b\r\n" % (len(chunk), chunk)
    yield b"0\r\n\r\n"
