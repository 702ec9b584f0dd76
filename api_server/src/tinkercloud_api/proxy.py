"""Forwards a request to a head, and its answer back, as bytes: streamed both ways, parsed never."""

from collections.abc import AsyncIterator, Mapping

import structlog

from tinkercloud_api.head_client import HeadClient, HeadResponse, HeadUnreachable
from tinkercloud_api.http import Send, answer
from tinkercloud_api.providers.base import HeadRoute
from tinkercloud_protocol import routes
from tinkercloud_protocol.errors import Unavailable

log = structlog.get_logger(__name__)

_FORWARDED = ("content-type", "content-encoding")
_RETURNED = frozenset({b"content-type", b"content-length", b"retry-after"})


class StaleRoute(Unavailable):
    """Another head serves at a route's address by now: the next try must find it."""


class Proxy:
    """Forwards to heads over kept-alive connections."""

    def __init__(self, client: HeadClient) -> None:
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
            StaleRoute: another head serves there by now.
            Unavailable: the head hung up or can't be reached, before any part of its answer came.
        """
        fields = [
            (routes.HEAD_TOKEN_HEADER.encode(), route.token.encode()),
            (routes.GENERATION_HEADER.encode(), route.generation.encode()),
            (routes.TARGET_HEADER.encode(), target.encode()),
        ]
        fields += [(n.encode(), headers[n].encode("latin-1")) for n in _FORWARDED if n in headers]
        if not isinstance(body, bytes) and "content-length" in headers:
            fields.append((b"content-length", headers["content-length"].encode("latin-1")))
        try:
            response = await self._client.post(route.url + path, fields, body)
        except HeadUnreachable as error:
            log.warning("a session head hung up", path=path, error=str(error))
            raise Unavailable(
                "the session head stopped answering; if it is gone, the next try will say so"
            ) from None
        async with response:
            if response.status == routes.WRONG_GENERATION_STATUS:
                raise StaleRoute("the session head was replaced; send the request again")
            substitute = (replace or {}).get(response.status)
            if substitute is not None:
                await answer(send, substitute[1], status=substitute[0])
            else:
                await _relay(send, response)


async def _relay(send: Send, response: HeadResponse) -> None:
    kept = [(name, value) for name, value in response.headers if name in _RETURNED]
    await send({"type": "http.response.start", "status": response.status, "headers": kept})
    async for chunk in response.chunks():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
