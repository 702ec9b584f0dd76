"""Calls to one inference server, and what its refusals mean.

    ServerError (Unavailable)   the server's fault, or nobody's: futures say category "server"
    ├── ServerUnreachable       no answer at all: it is down, restarting, or the network is
    ├── NotThere                it does not hold the adapter that was named
    └── AdaptersDisabled        it was started without adapters

What the server says is wrong with a request is raised as InvalidRequest, in its own words.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from tinkercloud_protocol.errors import InvalidRequest, Unavailable

Json = Mapping[str, Any]
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 3.0
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
            max_concurrent: calls of `post` at the same time; more wait.
        """
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._room = asyncio.Semaphore(max_concurrent)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Json | bytes, *, seconds: float | None = None) -> Json:
        """Send a request that may take as long as it takes, and return the answer.

        Args:
            path: beginning with a slash.
            body: sent as JSON, which bytes are already.
            seconds: how long to wait for the whole answer; None for ever.

        Raises:
            InvalidRequest: the server finds fault with the request.
            ServerError: it failed, or is not there.
        """
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self._room:
            status, content = await self._send("POST", path, content, seconds)
        if status != 200:
            raise self._refusal(path, status, content)
        return self._read(path, content)

    async def get(self, path: str, *, seconds: float) -> Json:
        """Ask for something; an empty answer is an empty object.

        Raises:
            InvalidRequest: there is no such thing to ask for.
            ServerError: the server failed, or is not there.
        """
        status, content = await self._send("GET", path, None, seconds)
        if status != 200:
            raise self._refusal(path, status, content)
        return self._read(path, content)

    async def close(self) -> None:
        """Close its connections. Calls that run fail; later ones connect again."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _send(
        self, method: str, path: str, body: bytes | None, seconds: float | None
    ) -> tuple[int, bytes]:
        if self._session is None:
            # The semaphore bounds the calls; a second bound would let health checks wait for them.
            # SGLang and vLLM close what has been idle for five seconds, and a POST on its way then
            # is lost.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        patience = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(
                method, self.url + path, data=body, timeout=patience
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = str(error) or type(error).__name__
            raise ServerUnreachable(
                f"the inference server {self.url} does not answer: {what}"
            ) from None

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
