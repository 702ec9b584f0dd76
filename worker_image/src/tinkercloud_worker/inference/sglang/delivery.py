"""Transfers weights to an SGLang engine: in requests, or by files that it can read.

Small weights are sent in requests and large ones read from files, since base64 in JSON is slower
than any file. If the engine rejects one method, the other is the fallback. An engine that does not
support tensors in requests, that rejects tensors but reads the files, or that crashes while loading
tensors, only gets files from then on. For full models a process group may be tried first.
"""

from collections.abc import Awaitable, Callable

import structlog

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_worker.inference.client import (
    InferenceClient,
    NotThere,
    ServerError,
    ServerUnreachable,
)

log = structlog.get_logger(__name__)

_CALL_SECONDS = 60.0
_MAX_LOSSES = 2
"""Consecutive losses of an engine during a method after which the method is disabled."""

Send = Callable[[int], Awaitable[None]]
"""Sends tensors to an engine with this number of ranks, one copy to each."""
Transfer = Callable[[], Awaitable[None]]
"""Transfers weights by one method."""


class TransferMethod:
    """One transfer method of one engine, with a circuit breaker."""

    def __init__(self, client: InferenceClient, what: str, method: str) -> None:
        """Create a method, which is enabled.

        Args:
            client: client of the engine.
            what: kind of weights, for the log.
            method: name of the method, for the log.
        """
        self._log_fields = {"url": client.url, "what": what, "way": method}
        self._losses = 0
        self.is_enabled = True

    async def attempt(self, transfer: Transfer) -> None:
        """Transfer weights; disable the method if the engine is lost twice in a row meanwhile.

        Raises:
            InvalidRequest, ServerError: as `transfer`.
        """
        try:
            await transfer()
        except ServerUnreachable:
            self._losses += 1
            if self._losses >= _MAX_LOSSES:
                self.disable(f"the engine was lost {self._losses} times in a row during it")
            raise
        self._losses = 0

    def re_enable(self) -> None:
        """Enable the method after a restart of the engine, unless losses have disabled it."""
        self.is_enabled = self._losses < _MAX_LOSSES

    def disable(self, reason: str) -> None:
        """Disable the method."""
        self.is_enabled = False
        log.warning("disabled a method of transferring weights", **self._log_fields, reason=reason)


class Delivery:
    """Transfers one kind of weights to one engine. Belongs to one event loop."""

    def __init__(self, client: InferenceClient, what: str, *, most_sent_bytes: int) -> None:
        """Create a delivery without calling the engine.

        Args:
            client: client of the engine.
            what: kind of weights, for the log.
            most_sent_bytes: maximum size that is sent in requests first, counted once per rank.
        """
        self._client = client
        self._most_sent_bytes = most_sent_bytes
        self._requests = TransferMethod(client, what, "request")

    async def deliver(self, size: int, send: Send, read: Transfer | None) -> None:
        """Transfer weights to the engine.

        Args:
            size: size of the weights, in bytes.
            send: sends them in requests.
            read: makes the engine read the files; None if it can't read files.

        Raises:
            InvalidRequest: the engine does not support the weights.
            ServerError: the engine failed, or is unreachable.
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
        """Return the number of ranks of the engine; each is sent a separate copy.

        Raises:
            ServerError: the engine does not report it.
        """
        info = await self._client.get("/server_info", seconds=_CALL_SECONDS)
        ranks = info.get("tp_size")
        if not isinstance(ranks, int):
            raise NotThere(
                f"{self._client.url}/server_info: tp_size must be an integer, got {ranks!r}"
            )
        return ranks

    async def _sent(self, send: Send, ranks: int) -> None:
        await self._requests.attempt(lambda: send(ranks))


async def _fall_back(transfer: Transfer, refusal: InvalidRequest | ServerError) -> None:
    """Try the other method; if both are rejected, raise the first error."""
    try:
        await transfer()
    except ServerUnreachable:
        raise
    except (InvalidRequest, ServerError) as other:
        # An unsupported endpoint says nothing about the weights.
        raise (other if isinstance(refusal, NotThere) else refusal) from None
