"""One request on a hot path, and the way to the head that it is for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from tinkercloud_api.auth import Principal
from tinkercloud_api.context import Context
from tinkercloud_api.http import HotRequest, Send
from tinkercloud_api.providers.base import HeadEndpoint, Pending
from tinkercloud_api.proxy import StaleEndpoint
from tinkercloud_protocol.errors import Unavailable

_HOLD_SECONDS = 45.0
"""How long a request waits for a head that is on its way: less than the SDK's own 60."""
_SILENCE_SECONDS = 60.0
"""Of a head that was sent all of a request: what takes long is a future, and the SDK waits no
longer."""


@dataclass(slots=True)
class Call:
    """One request and what is known of it."""

    server: Context
    request: HotRequest
    raw_send: Send
    principal: Principal
    """Who is asking."""
    has_answered: bool = False
    """Whether any part of an answer has been sent."""
    status: int | None = None
    """Of the answer, once it has begun."""

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the answer (ASGI)."""
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
        silence_seconds: float = _SILENCE_SECONDS,
    ) -> None:
        """Forward to a head, as `Proxy.forward` does."""
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
                silence_seconds=silence_seconds,
            )
        except StaleEndpoint:
            self.server.provider.invalidate(endpoint)
            raise


Handler = Callable[[Call], Awaitable[None]]


async def head_for_run(call: Call, model_id: str) -> HeadEndpoint:
    """Return the head of a model that is the caller's.

    Raises:
        NotFound: it is not.
        Unavailable: its head is not there yet; the message says why.
    """
    await call.server.locator.authorize_run(model_id, call.principal)
    call.server.activity.touch(model_id)
    locator = call.server.locator
    return await wait_for_head(locator.head_of_run(model_id), lambda: locator.run_pending(model_id))


async def wait_for_head(head: Awaitable[HeadEndpoint], why: Callable[[], Pending]) -> HeadEndpoint:
    """Wait for a head as long as a client waits for an answer.

    Raises:
        Unavailable: it is not there yet; the message says why.
    """
    try:
        async with asyncio.timeout(_HOLD_SECONDS):
            return await head
    except TimeoutError:
        raise Unavailable(why().reason) from None
