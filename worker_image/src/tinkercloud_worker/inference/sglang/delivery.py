"""Which way weights take to an SGLang engine: in requests, or by files that it sees.

Small ones are sent and large ones read, since base64 in JSON is slower than any file; what is
refused one way goes the other. An engine that has no request for tensors, refuses those it then
reads, or ends over them, gets only files from then on. Whole models may have a way before both.
"""

from collections.abc import Awaitable, Callable

import structlog

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_worker.inference.client import (
    InferenceClient,
    NotThere,
    ServerError,
    ServerUnreachable,
)

log = structlog.get_logger(__name__)

_CALL_SECONDS = 60.0
_MOST_LOST = 2
"""Times in a row that an engine may end over tensors before it is spared them."""

Send = Callable[[int], Awaitable[None]]
"""Sends tensors to an engine of so many ranks, a copy to each."""
Read = Callable[[], Awaitable[None]]


class Way:
    """Whether an engine is still given weights in one way."""

    def __init__(self, client: InferenceClient, what: str, how: str) -> None:
        """Make a way, which is open.

        Args:
            client: of the engine.
            what: is delivered, for the log.
            how: it is, for the log.
        """
        self._said = {"url": client.url, "what": what, "way": how}
        self._lost = 0
        self.is_open = True

    async def go(self, bring: Read) -> None:
        """Bring weights; an engine that is lost over it twice in a row is spared it from then on.

        Raises:
            InvalidRequest, ServerError: as `bring`.
        """
        try:
            await bring()
        except ServerUnreachable:
            self._lost += 1
            if self._lost >= _MOST_LOST:
                self.close(f"it was lost {self._lost} times in a row over it")
            raise
        self._lost = 0

    def reopen(self) -> None:
        """Use the way again with an engine that has begun again, unless it was lost over it."""
        self.is_open = self._lost < _MOST_LOST

    def close(self, reason: str) -> None:
        """Use the way no more."""
        self.is_open = False
        log.warning("an engine is spared a way of weights", **self._said, reason=reason)


class Delivery:
    """Of one kind of weights to one engine. Belongs to one event loop."""

    def __init__(self, client: InferenceClient, what: str, *, most_sent_bytes: int) -> None:
        """Make a delivery; the engine is not asked yet.

        Args:
            client: of the engine.
            what: is delivered, for the log.
            most_sent_bytes: that is tried in requests first, counted once for each rank.
        """
        self._client = client
        self._most_sent_bytes = most_sent_bytes
        self._requests = Way(client, what, "request")

    async def deliver(self, size: int, send: Send, read: Read | None) -> None:
        """Bring weights to the engine.

        Args:
            size: in bytes.
            send: brings them in requests.
            read: lets the engine read them; None where it sees no files.

        Raises:
            InvalidRequest: the engine does not take such weights.
            ServerError: the engine failed, or is not there.
        """
        if read is None:
            await self._sent(send, await self.ranks())
            return
        if not self._requests.is_open:
            await read()
            return
        try:
            ranks = await self.ranks()
        except NotThere as error:
            self._requests.close(error.message)
            await read()
            return
        if ranks * size > self._most_sent_bytes:
            await self._read_else_send(lambda: self._sent(send, ranks), read)
        else:
            await self._send_else_read(lambda: self._sent(send, ranks), read)

    async def _send_else_read(self, send: Read, read: Read) -> None:
        try:
            await send()
        except ServerUnreachable:
            raise
        except (InvalidRequest, ServerError) as refusal:
            await _second(read, refusal)
            self._requests.close(refusal.message)

    async def _read_else_send(self, send: Read, read: Read) -> None:
        try:
            await read()
        except ServerUnreachable:
            raise
        except (InvalidRequest, ServerError) as refusal:
            await _second(send, refusal)

    async def ranks(self) -> int:
        """Return how many ranks the engine has, each of which wants tensors of its own.

        Raises:
            ServerError: it does not say.
        """
        info = await self._client.get("/server_info", seconds=_CALL_SECONDS)
        ranks = info.get("tp_size")
        if not isinstance(ranks, int):
            raise NotThere(f"{self._client.url}/server_info names no tp_size, but {ranks!r}")
        return ranks

    async def _sent(self, send: Send, ranks: int) -> None:
        await self._requests.go(lambda: send(ranks))


async def _second(way: Read, refusal: InvalidRequest | ServerError) -> None:
    """Try the other way; what is refused both ways is refused as it was at first."""
    try:
        await way()
    except ServerUnreachable:
        raise
    except (InvalidRequest, ServerError) as other:
        # That there is no such request says nothing of the weights.
        raise (other if isinstance(refusal, NotThere) else refusal) from None
