"""HTTP client of one inference server, and its error classes.

    ServerError (Unavailable)   not the client's fault: futures fail with category "server"
    ├── ServerUnreachable       no response: the server is down or restarting, or the network fails
    ├── NotThere                the server does not have the named adapter
    └── AdaptersDisabled        the server was started without support for adapters

An error of the request is raised as InvalidRequest with the server's message.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from tinkercloud_protocol.heads.keepalive import keepalive_socket
from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable

Json = Mapping[str, Any]
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 3.0
_MESSAGE_CHARACTERS = 500
"""Maximum length of a server's message that is passed on."""


class ServerError(Unavailable):
    """A call to an inference server failed; the message says which server and why."""


class ServerUnreachable(ServerError):
    """The server did not respond, or the connection broke."""


class NotThere(ServerError):
    """The server does not have what the request names, for example after a restart."""


class AdaptersDisabled(ServerError):
    """The server does not support adapters."""


class InferenceClient:
    """A client of one server. Belongs to the event loop that first calls it."""

    def __init__(self, url: str, *, key: str | None, max_concurrent: int) -> None:
        """Create a client without connecting.

        Args:
            url: `http://host:port`.
            key: sent as a bearer token; None for servers without authentication.
            max_concurrent: maximum number of concurrent `generate` calls; others wait.
        """
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._room = asyncio.Semaphore(max_concurrent)
        self._session: aiohttp.ClientSession | None = None
        self._calls: set[asyncio.Timeout] = set()
        """Running and waiting calls that were not aborted."""
        self._abort_reason = ""
        """Why calls were aborted last."""

    async def generate(self, path: str, body: Json) -> Json:
        """Request tokens or logprobs, without a timeout.

        Raises:
            InvalidRequest: the server rejects the request.
            ServerError: the server failed, or is unreachable.
        """
        async with self._time_limit(None), self._room:
            return await self._answer("POST", path, orjson.dumps(body))

    async def post(self, path: str, body: Json | bytes, *, seconds: float) -> Json:
        """Send a command, which does not wait for `generate` calls.

        Args:
            path: path, starting with a slash.
            body: sent as JSON; bytes are JSON already.
            seconds: timeout of the whole call.

        Raises:
            InvalidRequest: the server rejects the request.
            ServerError: the server failed, or is unreachable.
        """
        async with self._time_limit(seconds):
            content = body if isinstance(body, bytes) else orjson.dumps(body)
            return await self._answer("POST", path, content)

    async def command(self, path: str, body: Json | bytes, *, seconds: float) -> None:
        """Like `post`, for calls not caused by a user: a rejection is not the user's error.

        Raises:
            ServerError: the server rejects the request, failed, or is unreachable.
        """
        try:
            await self.post(path, body, seconds=seconds)
        except InvalidRequest as error:
            raise ServerError(f"{self.url}{path}: {error.message}") from None

    async def get(self, path: str, *, seconds: float) -> Json:
        """Send a GET request; return an empty object for an empty response.

        Raises:
            InvalidRequest: the server rejects the request.
            ServerError: the server failed, or is unreachable.
        """
        async with self._time_limit(seconds):
            return await self._answer("GET", path, None)

    def abort_calls(self, reason: str) -> None:
        """Make all running and waiting calls raise ServerUnreachable with this message."""
        self._abort_reason = reason
        calls, self._calls = self._calls, set()
        now = asyncio.get_running_loop().time()
        for call in calls:
            if not call.expired():
                call.reschedule(now)

    async def close(self) -> None:
        """Close the connections. Running calls fail; later calls reconnect."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def _time_limit(self, seconds: float | None) -> AsyncIterator[None]:
        """Limit a call by time (None for no limit), and let `abort_calls` end it."""
        call = asyncio.timeout(seconds)
        try:
            async with call:
                self._calls.add(call)
                yield
        except TimeoutError:
            if seconds is None or call not in self._calls:
                raise ServerUnreachable(self._abort_reason) from None
            raise self._unreachable(f"no response within {seconds:.0f} s") from None
        finally:
            self._calls.discard(call)

    async def _answer(self, method: str, path: str, body: bytes | None) -> Json:
        status, content = await self._send(method, path, body)
        if status != 200:
            raise self._refusal(path, status, content)
        return self._read(path, content)

    async def _send(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if self._session is None:
            # The semaphore limits calls; with a limit here, health checks would wait for them.
            # SGLang and vLLM close connections after five idle seconds, and lose a POST that
            # arrives at that moment.
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=keepalive_socket
            )
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(
                method, self.url + path, data=body, timeout=timeout
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(str(error) or type(error).__name__) from None

    def _unreachable(self, what: str) -> ServerUnreachable:
        return ServerUnreachable(f"the inference server {self.url} does not respond: {what}")

    def _refusal(self, path: str, status: int, content: bytes) -> Exception:
        message = _message(content)
        if status in {400, 413, 422}:
            return InvalidRequest(f"the inference server rejected the request: {message}")
        if status in {401, 403}:
            return ServerError(
                f"the inference server {self.url} rejected this head's key (HTTP {status}): set"
                " sampler.inference.key_file to a file with the server's key"
            )
        if status == 404:
            return NotThere(f"{self.url}{path} returned HTTP 404: {message}")
        if status in {502, 503, 504}:
            return ServerUnreachable(f"{self.url}{path} returned HTTP {status}: {message}")
        return ServerError(f"the inference server {self.url} failed (HTTP {status}): {message}")

    def _read(self, path: str, content: bytes) -> Json:
        if not content.strip():
            return {}
        try:
            parsed = orjson.loads(content)
        except orjson.JSONDecodeError:
            return {"text": _message(content)}
        if isinstance(parsed, list):
            return {"items": parsed}
        if parsed is None:
            # The response of handlers that return nothing.
            return {}
        if not isinstance(parsed, dict):
            raise ServerError(
                f"{self.url}{path} returned {_message(content)}, expected a JSON object"
            )
        return parsed


def _message(content: bytes) -> str:
    """Return the message in an error response, or the beginning of the response if it has none."""
    text = content.decode(errors="replace").strip()
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError:
        parsed = None
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed)
        message = error
        if isinstance(error, dict):
            message = error.get("message") or error.get("error_message") or error
        text = message if isinstance(message, str) else orjson.dumps(message).decode()
    return text[:_MESSAGE_CHARACTERS] or "nothing"
