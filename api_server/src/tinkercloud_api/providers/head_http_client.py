"""HTTP client for session heads: aiohttp, plus streaming and timeouts that forwarding needs.

Request and response bodies are streamed as raw bytes, with backpressure. The time that the client
takes to send a body does not count towards the head's timeout. Nothing is retried here; the caller
may repeat any request safely.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from tinkercloud_protocol.heads.keepalive import keepalive_socket

_CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 30.0
"""Shorter than the head's keep-alive (75 s), so that no connection is reused while it closes."""
_AUTOMATIC_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp must not add: a head receives the client's headers unchanged."""


class HeadUnreachable(ConnectionError):
    """The head is unreachable, does not respond, or disconnected during its response."""


def open_client() -> aiohttp.ClientSession:
    """Return an HTTP client for heads, with a connection pool. It belongs to one event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=_IDLE_SECONDS,
            # The address behind a head's name changes when its pod is replaced.
            use_dns_cache=False,
            socket_factory=keepalive_socket,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


@dataclass(frozen=True, slots=True)
class HeadResponse:
    """Response of a head whose status and headers have been received."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    """Header names are in lower case."""
    chunks: AsyncIterator[bytes]
    """The body as it arrives; raises HeadUnreachable if the head disconnects or stalls."""


@asynccontextmanager
async def post(
    client: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    body: bytes | AsyncIterator[bytes],
    *,
    timeout_seconds: float,
) -> AsyncIterator[HeadResponse]:
    """Send a POST request; the context provides the response and releases the connection.

    Args:
        client: made by `open_client`.
        url: `http://host:port/path`.
        headers: all headers except Host, including the length of a streamed body if it is known.
        body: the whole body, or its chunks as they arrive. It is no longer read after the context.
        timeout_seconds: timeout for the start of the response after the whole request was sent,
            for each part of the request body, and for each part of the response.

    Raises:
        HeadUnreachable: the head is unreachable, timed out, or disconnected before it responded.
        Exception: any exception that reading the body raised.
    """
    upload = _Upload(body, timeout_seconds) if not isinstance(body, bytes) else None
    try:
        response = await _post(client, url, headers, upload or body, timeout_seconds)
        try:
            chunks = _chunks(response)
            if upload is not None and not upload.has_ended:
                # After its response, the head needs no more of the body, but aiohttp stops sending
                # it only when the response is complete. Until then nobody else may read the body.
                chunks = _whole([chunk async for chunk in chunks])
            fields = [(name.lower(), value) for name, value in response.raw_headers]
            yield HeadResponse(response.status, fields, chunks)
        finally:
            response.release()
    finally:
        if upload is not None:
            await upload.wait_until_unread()


async def _post(
    client: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    body: "bytes | _Upload | AsyncIterator[bytes]",
    timeout_seconds: float,
) -> aiohttp.ClientResponse:
    silent = f"the session head did not respond within {timeout_seconds:g} s"
    upload = body if isinstance(body, _Upload) else None
    try:
        async with asyncio.timeout(timeout_seconds) as timeout:
            if upload is not None:
                upload.start(timeout)
            return await client.post(
                url,
                data=body,
                headers=headers,
                skip_auto_headers=_AUTOMATIC_HEADERS,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_SECONDS, sock_read=timeout_seconds
                ),
            )
    except aiohttp.ConnectionTimeoutError:
        raise HeadUnreachable(
            f"the session head is unreachable: no connection within {_CONNECT_SECONDS:g} s"
        ) from None
    except aiohttp.ClientConnectorError as error:
        raise HeadUnreachable(f"the session head is unreachable: {error.os_error}") from None
    except TimeoutError:
        raise HeadUnreachable(silent) from None
    except aiohttp.ClientError as error:
        if upload is not None and upload.error is not None:
            raise upload.error from None
        raise _disconnected(error) from None
    finally:
        if upload is not None:
            upload.detach_timeout()


def _disconnected(error: Exception) -> HeadUnreachable:
    # Some aiohttp messages contain the request headers, which include the token.
    return HeadUnreachable(f"the session head disconnected ({type(error).__name__})")


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    except TimeoutError:
        raise HeadUnreachable("the session head stalled in the middle of its response") from None
    except aiohttp.ClientError as error:
        raise _disconnected(error) from None


async def _whole(chunks: Sequence[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


class _Upload:
    """A streamed body, which aiohttp sends in a task of its own.

    The head's timeout is paused while the body waits for its sender.
    """

    def __init__(self, chunks: AsyncIterator[bytes], timeout_seconds: float) -> None:
        self._chunks = chunks
        self._timeout_seconds = timeout_seconds
        self._timeout: asyncio.Timeout | None = None
        self._reading = asyncio.Lock()
        self.has_ended = False
        """Whether the whole body has arrived."""
        self.error: Exception | None = None
        """The exception that reading the body raised."""

    def start(self, timeout: asyncio.Timeout) -> None:
        """Set the timeout to pause and resume."""
        self._timeout = timeout

    def detach_timeout(self) -> None:
        """Stop pausing and resuming the timeout."""
        self._timeout = None

    async def wait_until_unread(self) -> None:
        """Wait until aiohttp, which has finished the request, has stopped reading the body."""
        async with self._reading:
            pass

    def __aiter__(self) -> "_Upload":
        return self

    async def __anext__(self) -> bytes:
        async with self._reading:
            self._set_timeout(None)
            try:
                return await anext(self._chunks)
            except StopAsyncIteration:
                self.has_ended = True
                raise
            except Exception as error:
                self.error = error
                raise
            finally:
                self._set_timeout(self._timeout_seconds)

    def _set_timeout(self, seconds: float | None) -> None:
        if self._timeout is not None and not self._timeout.expired():
            when = None if seconds is None else asyncio.get_running_loop().time() + seconds
            self._timeout.reschedule(when)
