"""HTTP to session heads: aiohttp's client, and what forwarding needs besides.

Request bodies are sent as they arrive and answers are read as they come, both with backpressure and
as the bytes they are. How long a head may be silent is counted without the time that the sender of
a body takes. Nothing is repeated here: whoever asked may, and to do so is safe.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

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
_AUTOMATIC_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Which aiohttp would add: a head is sent what the client sent."""


class HeadUnreachable(ConnectionError):
    """The head can't be connected to, is silent, or hung up before its answer was complete."""


def open_session() -> aiohttp.ClientSession:
    """Return a client for calls to heads, with a pool of connections. Belongs to one event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=_IDLE_SECONDS,
            # The name of a head leads to another address as soon as its pod was replaced.
            use_dns_cache=False,
            socket_factory=_kept_alive_socket,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


def _kept_alive_socket(address: tuple[object, ...]) -> socket.socket:
    """Return a socket that notices when the machine at its other end is gone."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)  # type: ignore[arg-type]  # as getaddrinfo gave it
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


@dataclass(frozen=True, slots=True)
class HeadResponse:
    """The answer of a head, of which status and headers have come."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    """Names in lower case."""
    chunks: AsyncIterator[bytes]
    """The body as it arrives; raises HeadUnreachable if the head hangs up or falls silent."""


@asynccontextmanager
async def post(
    session: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    body: bytes | AsyncIterator[bytes],
    *,
    silence_seconds: float,
) -> AsyncIterator[HeadResponse]:
    """Send a request; the context is its answer, whose connection is free again afterwards.

    Args:
        session: as made by `open_session`.
        url: `http://host:port/path`.
        headers: besides Host; one of them gives the length of a streamed body, if it is known.
        body: whole, or as it arrives. It is not being read any more when the context ends.
        silence_seconds: how long the head may take to begin its answer to all of the request, to
            take more of its body, and to continue its answer.

    Raises:
        HeadUnreachable: the head can't be connected to, is silent for longer, or hung up before it
            answered.
        Exception: what the body raised while it was read.
    """
    upload = _Upload(body, silence_seconds) if not isinstance(body, bytes) else None
    try:
        response = await _ask(session, url, headers, upload or body, silence_seconds)
        try:
            chunks = _chunks(response)
            if upload is not None and not upload.has_ended:
                # Once it has answered, the head wants no more of the body; aiohttp stops sending it
                # when the answer is complete. Only then may somebody else read the body's rest.
                chunks = _whole([chunk async for chunk in chunks])
            fields = [(name.lower(), value) for name, value in response.raw_headers]
            yield HeadResponse(response.status, fields, chunks)
        finally:
            response.release()
    finally:
        if upload is not None:
            await upload.wait_until_unread()


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    body: "bytes | _Upload | AsyncIterator[bytes]",
    silence_seconds: float,
) -> aiohttp.ClientResponse:
    silent = f"the session head was silent for {silence_seconds:g} s"
    upload = body if isinstance(body, _Upload) else None
    try:
        async with asyncio.timeout(silence_seconds) as patience:
            if upload is not None:
                upload.start(patience)
            return await session.post(
                url,
                data=body,
                headers=headers,
                skip_auto_headers=_AUTOMATIC_HEADERS,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_SECONDS, sock_read=silence_seconds
                ),
            )
    except aiohttp.ConnectionTimeoutError:
        raise HeadUnreachable(
            f"the session head can't be reached: no answer in {_CONNECT_SECONDS:g} s"
        ) from None
    except aiohttp.ClientConnectorError as error:
        raise HeadUnreachable(f"the session head can't be reached: {error.os_error}") from None
    except TimeoutError:
        raise HeadUnreachable(silent) from None
    except aiohttp.ClientError as error:
        if upload is not None and upload.error is not None:
            raise upload.error from None
        raise _hung_up(error) from None
    finally:
        if upload is not None:
            upload.stop_counting()


def _hung_up(error: Exception) -> HeadUnreachable:
    # Some of aiohttp's messages show the request's headers, and so the token.
    return HeadUnreachable(f"the session head hung up ({type(error).__name__})")


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    except TimeoutError:
        raise HeadUnreachable("the session head fell silent in the middle of its answer") from None
    except aiohttp.ClientError as error:
        raise _hung_up(error) from None


async def _whole(chunks: Sequence[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


class _Upload:
    """A body that aiohttp sends, in a task of its own, as it arrives.

    While its sender is waited for, the head's time to answer does not pass.
    """

    def __init__(self, chunks: AsyncIterator[bytes], silence_seconds: float) -> None:
        self._chunks = chunks
        self._silence_seconds = silence_seconds
        self._patience: asyncio.Timeout | None = None
        self._reading = asyncio.Lock()
        self.has_ended = False
        """Whether all of it has arrived."""
        self.error: Exception | None = None
        """What reading it raised."""

    def start(self, patience: asyncio.Timeout) -> None:
        """Have the time in which a head may be silent counted by `patience`."""
        self._patience = patience

    def stop_counting(self) -> None:
        """Have nothing counted any more."""
        self._patience = None

    async def wait_until_unread(self) -> None:
        """Wait until aiohttp, which was done with the request, has stopped reading."""
        async with self._reading:
            pass

    def __aiter__(self) -> "_Upload":
        return self

    async def __anext__(self) -> bytes:
        async with self._reading:
            self._allow(None)
            try:
                return await anext(self._chunks)
            except StopAsyncIteration:
                self.has_ended = True
                raise
            except Exception as error:
                self.error = error
                raise
            finally:
                self._allow(self._silence_seconds)

    def _allow(self, seconds: float | None) -> None:
        if self._patience is not None and not self._patience.expired():
            when = None if seconds is None else asyncio.get_running_loop().time() + seconds
            self._patience.reschedule(when)
