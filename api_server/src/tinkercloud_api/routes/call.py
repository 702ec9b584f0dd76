"""One request on a hot path, and how it reaches its session head."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from tinkercloud_api.auth import Principal
from tinkercloud_api.context import Context
from tinkercloud_api.http import HotRequest
from tinkercloud_api.providers.base import HeadEndpoint, Pending
from tinkercloud_api.proxy import StaleEndpoint
from tinkercloud_protocol.asgi import Message, Send
from tinkercloud_protocol.errors import Unavailable
from tinkercloud_protocol.futures import JSON

SMALL_BODY_BYTES = 1 << 20
"""Limit of bodies that name a request, and of what is parsed on the event loop."""
_WAIT_SECONDS = 45.0
"""How long a request waits for a head that is starting: less than the SDK's own 60 s."""
_RESPONSE_SECONDS = 60.0
"""How long a head that has received a whole request may take to respond. Long operations return
futures, and the SDK waits no longer than this."""
_MAX_MOVES = 2
"""How often one request follows its target to another head."""
_MOVING = Pending("active", "the run is being moved to another session head; send it again")


@dataclass(slots=True)
class Call:
    """One request, its caller, and the state of its response."""

    server: Context
    request: HotRequest
    raw_send: Send
    principal: Principal
    """The caller."""
    has_answered: bool = False
    """Whether any part of the response has been sent."""
    status: int | None = None
    """Status of the response; None until the response has started."""

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the response (ASGI)."""
        self.has_answered = True
        self.status = message.get("status", self.status)
        await self.raw_send(message)

    async def forward(
        self,
        endpoint: HeadEndpoint,
        target: str,
        body: bytes | AsyncIterator[bytes],
        *,
        replace: Mapping[int, tuple[int, bytes]] | None = None,
        refusal: str | None = None,
        extra: Mapping[str, str] | None = None,
        timeout_seconds: float = _RESPONSE_SECONDS,
    ) -> None:
        """Forward to a head, as `Proxy.forward` does.

        If the target is being moved to another head, the request is held and sent there. A body
        that has been streamed to the first head cannot be sent again.
        """
        send_to = partial(
            self.forward_once,
            target=target,
            body=body,
            replace=replace,
            refusal=refusal,
            extra=extra,
            timeout_seconds=timeout_seconds,
        )
        for _ in range(_MAX_MOVES if isinstance(body, bytes) else 0):
            try:
                return await send_to(endpoint)
            except StaleEndpoint:
                following = self.server.locator.head_after(target, endpoint)
                endpoint = await wait_for_head(following, lambda: _MOVING)
        return await send_to(endpoint)

    async def forward_once(
        self,
        endpoint: HeadEndpoint,
        target: str,
        body: bytes | AsyncIterator[bytes],
        *,
        replace: Mapping[int, tuple[int, bytes]] | None = None,
        refusal: str | None = None,
        extra: Mapping[str, str] | None = None,
        timeout_seconds: float = _RESPONSE_SECONDS,
    ) -> None:
        """Forward to a head; a target that is being moved is not followed."""
        try:
            await self.server.proxy.forward(
                self.send,
                endpoint,
                quote(self.request.path),
                target=target,
                headers=self.request.headers,
                body=body,
                replace=replace,
                refusal=refusal,
                extra={**self.server.tenants.headers(self.principal.owner), **(extra or {})},
                timeout_seconds=timeout_seconds,
            )
        except StaleEndpoint:
            self.server.provider.invalidate(endpoint)
            raise

    def of_own(self, path: str, body: bytes, send: Send) -> "Call":
        """Return a request of this server for the same caller, with a JSON body and response.

        Args:
            path: path of the request.
            body: its body.
            send: receives the response (ASGI).
        """
        headers = [(b"content-type", JSON.encode()), (b"accept", JSON.encode())]
        scope = {"method": "POST", "path": path, "headers": headers}

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        return Call(self.server, HotRequest(scope, receive), send, self.principal)


Handler = Callable[[Call], Awaitable[None]]


async def head_for_run(call: Call, model_id: str) -> HeadEndpoint:
    """Return the head of a model that the caller owns.

    Raises:
        NotFound: the model does not exist for this caller.
        Unavailable: its head is not ready yet; the message states the reason.
    """
    await call.server.locator.authorize_run(model_id, call.principal)
    call.server.activity.touch(model_id)
    locator = call.server.locator
    return await wait_for_head(locator.head_of_run(model_id), lambda: locator.run_pending(model_id))


async def wait_for_head(head: Awaitable[HeadEndpoint], why: Callable[[], Pending]) -> HeadEndpoint:
    """Wait for a head for as long as a client waits for a response.

    Raises:
        Unavailable: the head is not ready yet; the message states the reason.
    """
    try:
        async with asyncio.timeout(_WAIT_SECONDS):
            return await head
    except TimeoutError:
        raise Unavailable(why().reason) from None
