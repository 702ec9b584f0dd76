"""Forwards a request to a head, and its answer back, as bytes: streamed both ways, parsed never."""

from collections.abc import AsyncIterator, Mapping

import aiohttp
import structlog

from tinkercloud_api.http import Send
from tinkercloud_api.providers.base import HeadRoute
from tinkercloud_protocol import routes
from tinkercloud_protocol.errors import Unavailable

log = structlog.get_logger(__name__)

_FORWARDED = ("content-type", "content-encoding", "content-length")
_RETURNED = ("content-type", "content-length", "retry-after")
_CONNECT_SECONDS = 5.0


class Proxy:
    """Forwards to heads over kept-alive connections."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    async def forward(
        self,
        send: Send,
        route: HeadRoute,
        path: str,
        *,
        target: str,
        headers: Mapping[str, str],
        body: bytes | AsyncIterator[bytes],
        replace: Mapping[int, tuple[int, bytes]] | None = None,
    ) -> None:
        """Send a request to a head and its answer to the client.

        Args:
            send: where the answer goes (ASGI).
            route: the head.
            path: of the request.
            target: the model or sampling session whose ownership was checked.
            headers: of the client's request; only those about the body go on.
            body: whole, or as it arrives.
            replace: statuses of the head to answer differently, with a status and JSON body.

        Raises:
            Unavailable: the head hung up or can't be reached, before any part of its answer came.
        """
        forwarded = {name: headers[name] for name in _FORWARDED if name in headers}
        forwarded[routes.HEAD_TOKEN_HEADER] = route.token
        forwarded[routes.TARGET_HEADER] = target
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._client.post(
                route.url + path, data=body, headers=forwarded, timeout=timeout
            ) as response:
                substitute = (replace or {}).get(response.status)
                if substitute is None:
                    await _relay(send, response)
                    return
        except (aiohttp.ClientError, ConnectionError) as error:
            log.warning("a session head hung up", path=path, error=str(error))
            raise Unavailable(
                "the session head stopped answering; if it is gone, the next try will say so"
            ) from None
        status, content = substitute
        await _send_whole(send, status, content)


async def _relay(send: Send, response: aiohttp.ClientResponse) -> None:
    kept = [
        (name.encode(), response.headers[name].encode())
        for name in _RETURNED
        if name in response.headers
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": kept})
    async for chunk in response.content.iter_any():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _send_whole(send: Send, status: int, content: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
