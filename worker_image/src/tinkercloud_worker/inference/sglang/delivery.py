"""How weights are transferred to an SGLang engine: in requests, or by files that it sees.

Small ones are sent and large ones read, since base64 in JSON is slower than any file; if one method
is refused, the other is the fallback. An engine that has no request for tensors, that refuses
tensors and then reads the files, or that ends while it loads tensors, gets only files from then on.
Whole models may have a direct transfer that is tried before both.
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
"""Times in a row that an engine may be lost over a method before that is disabled."""

Send = Callable[[int], Awaitable[None]]
"""Sends tensors to an engine of so many ranks, a copy to each."""
Transfer = Callable[[], Awaitable[None]]
"""Transfers weights by one method."""


class TransferMethod:
    """One method of transfer to one engine, and whether it is used: a circuit breaker."""

    def __init__(self, client: InferenceClient, what: str, method: str) -> None:
        """Make a method, which is enabled.

        Args:
            client: of the engine.
            what: is transferred, for the log.
            method: its name, for the log.
        """
        self._log_fields = {"url": client.url, "what": what, "way": method}
        self._losses = 0
        self.is_enabled = True

    async def attempt(self, transfer: Transfer) -> None:
        """Transfer weights; the method is disabled if the engine is lost over it twice in a row.

        Raises:
            InvalidRequest, ServerError: as `transfer`.
        """
        try:
            await transfer()
        except ServerUnreachable:
            self._losses += 1
            if self._losses >= _MOST_LOST:
                self.disable(f"it was lost {self._losses} times in a row over it")
            raise
        self._losses = 0

    def re_enable(self) -> None:
        """Use the method with an engine that has restarted, unless engines were lost over it."""
        self.is_enabled = self._losses < _MOST_LOST

    def disable(self, reason: str) -> None:
        """Use the method no more."""
        self.is_enabled = False
        log.warning("an engine is spared a way of weights", **self._log_fields, reason=reason)


class Delivery:
    """Transfers one kind of weights to one engine. Belongs to one event loop."""

    def __init__(self, client: InferenceClient, what: str, *, most_sent_bytes: int) -> None:
        """Make a delivery; the engine is not asked yet.

        Args:
            client: of the engine.
            what: is transferred, for the log.
            most_sent_bytes: that is tried in requests first, counted once for each rank.
        """
        self._client = client
        self._most_sent_bytes = most_sent_bytes
        self._requests = TransferMethod(client, what, "request")

    async def deliver(self, size: int, send: Send, read: Transfer | None) -> None:
        """Transfer weights to the engine.

        Args:
            size: in bytes.
            send: sends them in requests.
            read: has the engine read them; None where it sees no files.

        Raises:
            InvalidRequest: the engine does not take such weights.
            ServerError: the engine failed, or is not there.
        """
        if read is None:
            await self._sent(send, await self.ranks())
            return
        if not self._requests.is_enabled:
            await read()
            return
        try:
            ranks = await self.ranks()
        except NotThere as error:
            self._requests.disable(error.message)
            await read()
            return
        if ranks * size > self._most_sent_bytes:
            await self._read_else_send(lambda: self._sent(send, ranks), read)
        else:
            await self._send_else_read(lambda: self._sent(send, ranks), read)

    async def _send_else_read(self, send: Transfer, read: Transfer) -> None:
        try:
            await send()
        except ServerUnreachable:
            raise
        except (InvalidRequest, ServerError) as refusal:
            await _fall_back(read, refusal)
            self._requests.disable(refusal.message)

    async def _read_else_send(self, send: Transfer, read: Transfer) -> None:
        try:
            await read()
        except ServerUnreachable:
            raise
        except (InvalidRequest, ServerError) as refusal:
            await _fall_back(send, refusal)

    async def ranks(self) -> int:
        """Return how many ranks the engine has; each is sent a copy of its own.

        Raises:
            ServerError: it does not say.
        """
        info = await self._client.get("/server_info", seconds=_CALL_SECONDS)
        ranks = info.get("tp_size")
        if not isinstance(ranks, int):
            raise NotThere(f"{self._client.url}/server_info names no tp_size, but {ranks!r}")
        return ranks

    async def _sent(self, send: Send, ranks: int) -> None:
        await self._requests.attempt(lambda: send(ranks))


async def _fall_back(transfer: Transfer, refusal: InvalidRequest | ServerError) -> None:
    """Try the other method; if both are refused, raise the first refusal."""
    try:
        await transfer()
    except ServerUnreachable:
        raise
    except (InvalidRequest, ServerError) as other:
        # That there is no such request says nothing of the weights.
        raise (other if isinstance(refusal, NotThere) else refusal) from None
