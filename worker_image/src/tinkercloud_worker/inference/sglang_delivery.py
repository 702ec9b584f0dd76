"""Which way weights take to an SGLang engine: in requests, or by files that it sees.

Small ones are sent and large ones read, since base64 in JSON is slower than any file; what is
refused one way goes the other. An engine that has no request for tensors, refuses those it then
reads, or ends over them, gets only files from then on.
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
        self._what = what
        self._most_sent_bytes = most_sent_bytes
        self._lost = 0
        self._takes_tensors = True

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
            await self._sent(send, await self._ranks())
            return
        if not self._takes_tensors:
            await read()
            return
        try:
            ranks = await self._ranks()
        except NotThere as error:
            self._stop(error.message)
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
            self._stop(refusal.message)

    async def _read_else_send(self, send: Read, read: Read) -> None:
        try:
            await read()
        except ServerUnreachable:
            raise
        except (InvalidRequest, ServerError) as refusal:
            await _second(send, refusal)

    async def _ranks(self) -> int:
        """Return how many copies of tensors the engine wants; with too few it would end."""
        info = await self._client.get("/server_info", seconds=_CALL_SECONDS)
        ranks = info.get("tp_size")
        if not isinstance(ranks, int):
            raise NotThere(f"{self._client.url}/server_info names no tp_size, but {ranks!r}")
        return ranks

    async def _sent(self, send: Send, ranks: int) -> None:
        try:
            await send(ranks)
        except ServerUnreachable:
            self._lost += 1
            if self._lost >= _MOST_LOST:
                self._stop(f"it was lost {self._lost} times in a row while it was sent tensors")
            raise
        self._lost = 0

    def _stop(self, reason: str) -> None:
        self._takes_tensors = False
        log.warning(
            "an engine gets files alone", url=self._client.url, what=self._what, reason=reason
        )


async def _second(way: Read, refusal: InvalidRequest | ServerError) -> None:
    """Try the other way; what is refused both ways is refused as it was at first."""
    try:
        await way()
    except ServerUnreachable:
        raise
    except (InvalidRequest, ServerError) as other:
        # That there is no such request says nothing of the weights.
        raise (other if isinstance(refusal, NotThere) else refusal) from None
