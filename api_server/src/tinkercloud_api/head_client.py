"""HTTP/1.1 to session heads, with as little between the sockets as can be.

Every training step passes through here, so this is not a general client: one kind of request
(POST), kept-alive connections, no redirects, cookies or compression. Responses are parsed by
httptools as they arrive and handed on chunk by chunk; reading stops while the other side is slow,
and so does writing. A general client took three times as long for a small call
(`benchmarks/service.py`, C16).
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools

Headers = Sequence[tuple[bytes, bytes]]

_BUFFERED_BYTES = 256 << 10
"""Of one response, before reading from the head is paused."""
_IDLE_SECONDS = 30.0
"""Less than the head keeps an idle connection open (75 s), so that none is used as it closes."""


class HeadUnreachable(ConnectionError):
    """The head can't be connected to, or hung up before its answer was complete."""


class _Connection(asyncio.Protocol):
    """One connection: one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
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

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
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

    async def send(self, head: bytes, body: bytes | AsyncIterator[bytes]) -> None:
        """Write a request, and wait for the status and headers of its answer."""
        self._reset()
        if isinstance(body, bytes):
            self._write(head + body)
            self._is_sent = True
        else:
            self._write(head)
            self._is_sent = await self._stream(body)
        while not self.has_answered:
            await self._wait()

    async def _stream(self, body: AsyncIterator[bytes]) -> bool:
        """Write a body as it arrives; return whether it was wanted to its end."""
        async for chunk in body:
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
        self._idle: dict[str, list[_Connection]] = defaultdict(list)

    async def post(
        self, url: str, headers: Headers, body: bytes | AsyncIterator[bytes]
    ) -> HeadResponse:
        """Send a request and return its answer, of which status and headers have come.

        Args:
            url: `http://host:port/path`.
            headers: besides Host; one of them gives the body's length if it is known.
            body: whole, or as it arrives.

        Raises:
            HeadUnreachable: the head can't be connected to, or hung up before it answered.
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
            await connection.send(head, body)
        except BaseException:
            connection.close()
            raise
        return HeadResponse(self, parts.netloc, connection)

    async def _connection(self, authority: str) -> _Connection:
        idle = self._idle[authority]
        loop = asyncio.get_running_loop()
        while idle:
            connection = idle.pop()
            if connection.is_open and loop.time() - connection.idle_since < _IDLE_SECONDS:
                return connection
            connection.close()
        host, _, port = authority.rpartition(":")
        try:
            _, connection = await loop.create_connection(_Connection, host.strip("[]"), int(port))
        except OSError as error:
            raise HeadUnreachable(f"the session head can't be reached: {error}") from None
        return connection

    def give_back(self, authority: str, connection: _Connection) -> None:
        """Keep a connection for the next request, if it can serve one."""
        if connection.is_reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle[authority].append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close all idle connections."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()


async def _chunked(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in body:
        yield b"%x\r\n%b\r\n" % (len(chunk), chunk)
    yield b"0\r\n\r\n"
