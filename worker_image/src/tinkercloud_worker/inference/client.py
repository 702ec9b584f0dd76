"""Calls to one inference server, and what its refusals mean.

    ServerError (Unavailable)   the server's fault, or nobody's: futures say category "server"
    ├── ServerUnreachable       no answer at all: it is down, restarting, or the network is
    ├── NotThere                it does not hold the adapter that was named
    └── AdaptersDisabled        it was started without adapters

What the server says is wrong with a request is raised as InvalidRequest, in its own words.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from tinkercloud_protocol.errors import InvalidRequest, Unavailable

Json = Mapping[str, Any]
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 3.0
_KEEPALIVE = {
    "TCP_KEEPIDLE": 30,
    # What macOS calls the same.
    "TCP_KEEPALIVE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
}
"""Break connections on which an answer is awaited within a minute of silence from a machine;
systems lack some of these."""
_WORDS = 500
"""Characters of a server's message that are passed on."""


class ServerError(Unavailable):
    """An inference server did not do what it was asked; the message says which and why."""


class ServerUnreachable(ServerError):
    """It gave no answer, or broke off."""


class NotThere(ServerError):
    """It does not hold what the request names, as after a restart."""


class AdaptersDisabled(ServerError):
    """It takes no adapters at all."""


class InferenceClient:
    """One server. Belongs to the event loop that first calls it."""

    def __init__(self, url: str, *, key: str | None, max_concurrent: int) -> None:
        """Make a client; nothing is connected yet.

        Args:
            url: `http://host:port`.
            key: sent as a bearer token; None for servers that want none.
            max_concurrent: calls of `generate` at the same time; more wait.
        """
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._room = asyncio.Semaphore(max_concurrent)
        self._session: aiohttp.ClientSession | None = None
        self._calls: set[asyncio.Timeout] = set()
        """Those that run or wait, unless they were given up."""
        self._loss = ""
        """Why calls were last given up."""

    async def generate(self, path: str, body: Json) -> Json:
        """Ask for tokens or logprobs, which take as long as they take, and return the answer.

        Raises:
            InvalidRequest: the server rejects the request.
            ServerError: it failed, or is not there.
        """
        async with self._patience(None), self._room:
            return await self._answer("POST", path, orjson.dumps(body))

    async def post(self, path: str, body: Json | bytes, *, seconds: float) -> Json:
        """Send a command; it does not wait for calls of `generate`.

        Args:
            path: beginning with a slash.
            body: sent as JSON, which bytes are already.
            seconds: how long to wait for the whole answer.

        Raises:
            InvalidRequest: the server rejects the request.
            ServerError: it failed, or is not there.
        """
        async with self._patience(seconds):
            content = body if isinstance(body, bytes) else orjson.dumps(body)
            return await self._answer("POST", path, content)

    async def command(self, path: str, body: Json | bytes, *, seconds: float) -> None:
        """Like `post`, for what no user asked for: no refusal of it is a user's error.

        Raises:
            ServerError: the server refuses, failed, or is not there.
        """
        try:
            await self.post(path, body, seconds=seconds)
        except InvalidRequest as error:
            raise ServerError(f"{self.url}{path}: {error.message}") from None

    async def get(self, path: str, *, seconds: float) -> Json:
        """Ask for something; an empty answer is an empty object.

        Raises:
            InvalidRequest: there is no such thing to ask for.
            ServerError: the server failed, or is not there.
        """
        async with self._patience(seconds):
            return await self._answer("GET", path, None)

    def give_up(self, reason: str) -> None:
        """Make all calls that run or wait raise ServerUnreachable, with the reason as message."""
        self._loss = reason
        calls, self._calls = self._calls, set()
        now = asyncio.get_running_loop().time()
        for call in calls:
            if not call.expired():
                call.reschedule(now)

    async def close(self) -> None:
        """Close its connections. Calls that run fail; later ones connect again."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def _patience(self, seconds: float | None) -> AsyncIterator[None]:
        """Bound a call by time, None for no bound, and by `give_up`."""
        call = asyncio.timeout(seconds)
        try:
            async with call:
                self._calls.add(call)
                yield
        except TimeoutError:
            if seconds is None or call not in self._calls:
                raise ServerUnreachable(self._loss) from None
            raise self._unreachable(f"nothing for {seconds:.0f} s") from None
        finally:
            self._calls.discard(call)

    async def _answer(self, method: str, path: str, body: bytes | None) -> Json:
        status, content = await self._send(method, path, body)
        if status != 200:
            raise self._refusal(path, status, content)
        return self._read(path, content)

    async def _send(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if self._session is None:
            # The semaphore bounds the calls; a second bound would let health checks wait for them.
            # SGLang and vLLM close what has been idle for five seconds, and a POST on its way then
            # is lost.
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=_kept_alive
            )
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        patience = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(
                method, self.url + path, data=body, timeout=patience
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(str(error) or type(error).__name__) from None

    def _unreachable(self, what: str) -> ServerUnreachable:
        return ServerUnreachable(f"the inference server {self.url} does not answer: {what}")

    def _refusal(self, path: str, status: int, content: bytes) -> Exception:
        words = _words(content)
        if status in {400, 413, 422}:
            return InvalidRequest(f"the inference server refuses this request: {words}")
        if status in {401, 403}:
            return ServerError(
                f"the inference server {self.url} refuses this head ({status}): set"
                " sampler.inference.key_file to a file that holds its key"
            )
        if status == 404:
            return NotThere(f"{self.url}{path} answers 404: {words}")
        if status in {502, 503, 504}:
            return ServerUnreachable(f"{self.url}{path} answers {status}: {words}")
        return ServerError(f"the inference server {self.url} failed ({status}): {words}")

    def _read(self, path: str, content: bytes) -> Json:
        if not content.strip():
            return {}
        try:
            parsed = orjson.loads(content)
        except orjson.JSONDecodeError:
            return {"text": _words(content)}
        if isinstance(parsed, list):
            return {"items": parsed}
        if parsed is None:
            # What handlers that return nothing answer.
            return {}
        if not isinstance(parsed, dict):
            raise ServerError(f"{self.url}{path} answers {_words(content)}, not a JSON object")
        return parsed


def _kept_alive(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that notices when the machine at its other end is gone."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _words(content: bytes) -> str:
    """Return what an error's body says: its message if it has one, else its beginning."""
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
    return text[:_WORDS] or "nothing"
