"""Forwards a request to a head, and its answer back, as bytes: streamed both ways, parsed never."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import quote

import aiohttp
import structlog

from tinkercloud_api import head_client, metrics
from tinkercloud_api.head_client import HeadResponse, HeadUnreachable
from tinkercloud_api.http import Send, respond
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_protocol import routes
from tinkercloud_protocol.errors import Unavailable

log = structlog.get_logger(__name__)

_FORWARDED = ("content-type", "content-encoding")
_RETURNED = frozenset({b"content-type", b"content-length", b"retry-after"})
_TO_HEAD = metrics.PROXY_BYTES.labels("to_head")
_FROM_HEAD = metrics.PROXY_BYTES.labels("from_head")


class StaleEndpoint(Unavailable):
    """Another head serves at a endpoint's address by now: the next try must find it."""


class Proxy:
    """Forwards to heads over kept-alive connections."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def forward(
        self,
        send: Send,
        endpoint: HeadEndpoint,
        path: str,
        *,
        target: str,
        headers: Mapping[str, str],
        body: bytes | AsyncIterator[bytes],
        replace: Mapping[int, tuple[int, bytes]] | None = None,
        refusal: str | None = None,
        silence_seconds: float,
    ) -> None:
        """Send a request to a head and its answer to the client.

        Args:
            send: where the answer goes (ASGI).
            endpoint: the head.
            path: of the request.
            target: the model or sampling session whose ownership was checked.
            headers: of the client's request; only those about the body go on.
            body: whole, or as it arrives.
            replace: statuses of the head to answer differently, with a status and JSON body.
            refusal: why the head is to refuse the request, in its place in its model's order.
            silence_seconds: how long the head may take to begin its answer.

        Raises:
            StaleEndpoint: another head serves there by now.
            Unavailable: the head hung up, can't be reached or is silent for longer, before any part
                of its answer came. It may have taken the request; to repeat it is safe.
        """
        fields = {
            routes.HEAD_TOKEN_HEADER: endpoint.token,
            routes.GENERATION_HEADER: endpoint.generation,
            routes.TARGET_HEADER: target,
        }
        if refusal is not None:
            fields[routes.REFUSAL_HEADER] = quote(refusal)
        fields.update({name: headers[name] for name in _FORWARDED if name in headers})
        if not isinstance(body, bytes) and "content-length" in headers:
            fields["content-length"] = headers["content-length"]
        with metrics.PROXY_REQUESTS.track_inprogress():
            async with self._ask(endpoint.url + path, fields, body, silence_seconds) as response:
                if response.status == routes.WRONG_GENERATION_STATUS:
                    metrics.PROXY_ERRORS.labels("replaced").inc()
                    raise StaleEndpoint("the session head was replaced; send the request again")
                substitute = (replace or {}).get(response.status)
                if substitute is not None:
                    await respond(send, substitute[1], status=substitute[0])
                else:
                    await _relay(send, response)

    @asynccontextmanager
    async def _ask(
        self,
        url: str,
        fields: Mapping[str, str],
        body: bytes | AsyncIterator[bytes],
        silence_seconds: float,
    ) -> AsyncIterator[HeadResponse]:
        if isinstance(body, bytes):
            _TO_HEAD.inc(len(body))
        else:
            body = _counted(body)
        has_answered = False
        try:
            async with head_client.post(
                self._session, url, fields, body, silence_seconds=silence_seconds
            ) as response:
                has_answered = True
                yield response
        except HeadUnreachable as error:
            if has_answered:
                raise
            metrics.PROXY_ERRORS.labels("unreachable").inc()
            log.warning("a session head does not answer", url=url, error=str(error))
            raise Unavailable(
                "the session head stopped answering; if it is gone, the next try will say so"
            ) from None


async def _counted(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in body:
        _TO_HEAD.inc(len(chunk))
        yield chunk


async def _relay(send: Send, response: HeadResponse) -> None:
    kept = [(name, value) for name, value in response.headers if name in _RETURNED]
    await send({"type": "http.response.start", "status": response.status, "headers": kept})
    try:
        async for chunk in response.chunks:
            _FROM_HEAD.inc(len(chunk))
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except HeadUnreachable:
        metrics.PROXY_ERRORS.labels("broke_off").inc()
        raise
    await send({"type": "http.response.body", "body": b""})
