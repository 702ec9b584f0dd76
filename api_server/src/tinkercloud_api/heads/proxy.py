"""Forwards requests to heads and streams their responses back, as bytes, without parsing them."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import quote

import aiohttp
import structlog

from tinkercloud_api.config import api_metrics
from tinkercloud_api.providers import head_http_client
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.providers.head_http_client import HeadResponse, HeadUnreachable
from tinkercloud_protocol.wire import request_ids, routes
from tinkercloud_protocol.wire.asgi import Send, respond
from tinkercloud_protocol.wire.errors import Unavailable, WireError

log = structlog.get_logger(__name__)

FORWARDED_HEADERS = ("content-type", "content-encoding", "accept", routes.IDEMPOTENCY_HEADER)
"""Headers of clients that heads read."""
_NAMES = {
    request_ids.LOG_FIELD: request_ids.HEADER,
    request_ids.TRACE_LOG_FIELD: request_ids.TRACE_HEADER,
}
"""Headers that name a request to its head, by the field of log lines with the same content."""
_RETURNED = frozenset({b"allow", b"content-type", b"content-length", b"retry-after"})
_TO_HEAD = api_metrics.PROXY_BYTES.labels("to_head")
_FROM_HEAD = api_metrics.PROXY_BYTES.labels("from_head")


class StaleEndpoint(Unavailable):
    """Another head now serves at the endpoint's address; the endpoint must be looked up again."""


class Proxy:
    """Forwards requests to heads over keep-alive connections."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.running = Counter[str]()
        """Number of requests of models and sampling sessions that heads respond to now."""

    async def forward(
        self,
        send: Send,
        endpoint: HeadEndpoint,
        path: str,
        *,
        target: str,
        owner: str,
        headers: Mapping[str, str],
        body: bytes | AsyncIterator[bytes],
        replace: Mapping[int, tuple[int, bytes] | WireError] | None = None,
        refusal: str | None = None,
        extra: Mapping[str, str] | None = None,
        timeout_seconds: float,
    ) -> None:
        """Send a request to a head and stream its response to the client.

        Args:
            send: sends the response to the client (ASGI).
            endpoint: endpoint of the head.
            path: path of the request.
            target: the model or sampling session whose ownership was checked.
            owner: who sent the request, for metrics.
            headers: headers of the client's request; only those that heads read are forwarded.
            body: the whole body, or its chunks as they arrive.
            replace: responses to substitute, by the head's status: a status and a JSON body, or an
                error to raise.
            refusal: why the head must reject the request, at its position in its model's sequence;
                None for a request to execute.
            extra: headers of ours for the head (`routes`).
            timeout_seconds: how long the head may take to start its response.

        Raises:
            StaleEndpoint: another head now serves at this address.
            Unavailable: the head disconnected, is unreachable or did not respond in time. It may
                have accepted the request; repeating the request is safe.
        """
        fields = {
            routes.HEAD_TOKEN_HEADER: endpoint.token,
            routes.GENERATION_HEADER: endpoint.generation,
            routes.TARGET_HEADER: target,
            **_names(),
            **(extra or {}),
        }
        if refusal is not None:
            fields[routes.REFUSAL_HEADER] = quote(refusal)
        fields.update({name: headers[name] for name in FORWARDED_HEADERS if name in headers})
        if not isinstance(body, bytes) and "content-length" in headers:
            fields["content-length"] = headers["content-length"]
        with api_metrics.forwarding(owner), self._counted(target):
            async with self._post(endpoint.url + path, fields, body, timeout_seconds) as response:
                if response.status == routes.WRONG_GENERATION_STATUS:
                    api_metrics.PROXY_ERRORS.labels("replaced").inc()
                    raise StaleEndpoint("the session head was replaced; send the request again")
                substitute = (replace or {}).get(response.status)
                if isinstance(substitute, WireError):
                    raise substitute
                if substitute is not None:
                    await respond(send, substitute[1], status=substitute[0])
                else:
                    await _relay(send, response)

    @contextmanager
    def _counted(self, target: str) -> Iterator[None]:
        self.running[target] += 1
        try:
            yield
        finally:
            self.running[target] -= 1
            if not self.running[target]:
                del self.running[target]

    @asynccontextmanager
    async def _post(
        self,
        url: str,
        fields: Mapping[str, str],
        body: bytes | AsyncIterator[bytes],
        timeout_seconds: float,
    ) -> AsyncIterator[HeadResponse]:
        if isinstance(body, bytes):
            _TO_HEAD.inc(len(body))
        else:
            body = _count_bytes(body)
        has_responded = False
        try:
            async with head_http_client.post(
                self._session, url, fields, body, timeout_seconds=timeout_seconds
            ) as response:
                has_responded = True
                yield response
        except HeadUnreachable as error:
            if has_responded:
                raise
            api_metrics.PROXY_ERRORS.labels("unreachable").inc()
            log.warning("a session head does not respond", url=url, error=str(error))
            raise Unavailable(
                "the session head stopped responding; send the request again: if the head is"
                " gone, the response says so"
            ) from None


def _names() -> Mapping[str, str]:
    """Return the headers that name the current request to a head."""
    bound = structlog.contextvars.get_contextvars()
    return {header: bound[field] for field, header in _NAMES.items() if field in bound}


async def _count_bytes(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in body:
        _TO_HEAD.inc(len(chunk))
        yield chunk


async def _relay(send: Send, response: HeadResponse) -> None:
    kept = [(name, value) for name, value in response.headers if name in _RETURNED]
    await send({"type": "http.response.start", "status": response.status, "headers": kept})
    declared = next((int(value) for name, value in kept if name == b"content-length"), None)
    sent, has_more = 0, True
    try:
        async for chunk in response.chunks:
            _FROM_HEAD.inc(len(chunk))
            sent += len(chunk)
            has_more = sent != declared
            await send({"type": "http.response.body", "body": chunk, "more_body": has_more})
    except HeadUnreachable:
        api_metrics.PROXY_ERRORS.labels("broke_off").inc()
        raise
    if has_more:
        await send({"type": "http.response.body", "body": b""})
