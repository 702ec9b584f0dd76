"""Samples that are complete, in order, for clients that wait for all their samples in one poll."""

import asyncio
import secrets
from dataclasses import dataclass, field

from tinkercloud_protocol.responses import batched_futures
from tinkercloud_protocol.responses.batched_futures import (
    CLIENT_NUMBERS,
    Cursor,
    SamplingSessionTarget,
)
from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.future_responses import Result
from tinkercloud_protocol.wire.ids import RequestId, SamplingSessionId

Client = tuple[str, int]
"""A sampling session, and the number of one of its clients."""


@dataclass(slots=True)
class _Samples:
    """The samples of one client, as far as their results are kept."""

    known: set[str] = field(default_factory=set)
    """Ids of samples whose result is awaited or kept."""
    latest: int = 0
    """The highest number of a sample, counted from the client's first."""
    completed: dict[str, tuple[int, dict[str, object]]] = field(default_factory=dict)
    """Event numbers and entries of completed samples by request id, in the order of the events."""
    lost: set[str] = field(default_factory=set)
    """Completed samples whose results were dropped before the client retrieved them."""
    is_polled: bool = False
    """Whether the client waits for its samples here."""
    num_waiting: int = 0
    """How many polls wait."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_empty(self) -> bool:
        return not (self.known or self.completed or self.num_waiting)

    def trim(self, event: int) -> None:
        """Forget the lost samples that the client has seen complete."""
        seen = [name for name in self.lost if self.completed[name][0] <= event]
        for name in seen:
            self.lost.discard(name)
            del self.completed[name]


class Completions:
    """Completed samples by client. Belongs to one event loop, as `Results`, which it follows."""

    def __init__(self) -> None:
        """Create an index without samples."""
        self._epoch = batched_futures.epoch_of(secrets.randbits(32))
        self._event = 0
        """Number of completions of all clients."""
        self._clients: dict[Client, _Samples] = {}
        self._is_closed = False

    def open(self, request_id: str) -> None:
        """Record that a request was accepted; requests that are not samples have no effect."""
        if (client := _client(request_id)) is not None:
            samples = self._clients.setdefault(client, _Samples())
            samples.known.add(request_id)
            number = RequestId.parse(request_id).seq_id % CLIENT_NUMBERS
            samples.latest = max(samples.latest, number)

    def finish(self, request_id: str, result: Result) -> None:
        """Record that a sample is complete, and wake the client that waits for it."""
        if (client := _client(request_id)) is None:
            return
        samples = self._clients[client]
        self._event += 1
        # Results of samples are protobuf, and errors JSON.
        is_failure = result.content_type == future_responses.JSON
        entry = (
            batched_futures.failed(request_id)
            if is_failure
            else batched_futures.complete(request_id, size=len(result.body))
        )
        samples.completed[request_id] = (self._event, entry)
        samples.changed.set()

    def forget(self, request_id: str) -> None:
        """Forget a request whose result was retrieved, or has no reader."""
        if (client := _client(request_id)) is not None:
            samples = self._clients[client]
            samples.known.discard(request_id)
            samples.lost.discard(request_id)
            samples.completed.pop(request_id, None)
            self._remove_if_empty(client)

    def lose(self, request_id: str) -> None:
        """Forget the result of a request, but report it: its client has to send it again."""
        client = _client(request_id)
        if client is None or not self._clients[client].is_polled:
            self.forget(request_id)
        elif request_id in self._clients[client].completed:
            self._clients[client].known.discard(request_id)
            self._clients[client].lost.add(request_id)

    def close(self) -> None:
        """Answer all polls at once from now on: their clients continue at another head."""
        self._is_closed = True
        for samples in self._clients.values():
            samples.changed.set()

    async def wait(self, target: SamplingSessionTarget, value: int, seconds: float) -> bytes:
        """Wait until samples of a client are complete that no answer has reported.

        Args:
            target: the client.
            value: its cursor.
            seconds: how long to wait.

        Returns:
            The response, see `batched_futures.answer`.
        """
        client = (target.sampling_session_id, target.cloned_sampler_id)
        cursor = Cursor.parse(value)
        if self._is_unknown(client, cursor):
            return self._resynchronized(target, cursor)
        samples = self._clients.setdefault(client, _Samples())
        samples.is_polled = True
        samples.trim(cursor.event)
        samples.num_waiting += 1
        try:
            async with asyncio.timeout(seconds):
                while not (_after(samples, cursor.event) or self._is_closed):
                    samples.changed.clear()
                    await samples.changed.wait()
        except TimeoutError:
            pass
        finally:
            samples.num_waiting -= 1
            self._remove_if_empty(client)
        new = _after(samples, cursor.event)
        reached = Cursor(self._epoch, max(samples.latest, cursor.latest), self._event)
        return batched_futures.answer(new, int(reached))

    def _is_unknown(self, client: Client, cursor: Cursor) -> bool:
        """Return whether the client's samples may have been accepted by another head."""
        if cursor.epoch == 0:
            return client not in self._clients or cursor.event > 0
        return cursor.epoch != self._epoch

    def _resynchronized(self, target: SamplingSessionTarget, cursor: Cursor) -> bytes:
        names, following = batched_futures.nearby(target, cursor)
        if following.event == 0:
            # From the first event on: no answer of this head has reported any.
            client = (target.sampling_session_id, target.cloned_sampler_id)
            latest = max(self._clients.get(client, _Samples()).latest, cursor.latest)
            following = Cursor(self._epoch, latest, 0)
        entries = [batched_futures.complete(name) for name in names]
        return batched_futures.answer(entries, int(following))

    def _remove_if_empty(self, client: Client) -> None:
        samples = self._clients.get(client)
        if samples is not None and samples.is_empty:
            del self._clients[client]


def _after(samples: _Samples, event: int) -> list[dict[str, object]]:
    """Return the entries of samples that were completed after an event."""
    return [entry for number, entry in samples.completed.values() if number > event]


def _client(request_id: str) -> Client | None:
    """Return the client that sent a sample; None for other requests."""
    try:
        parsed = RequestId.parse(request_id)
    except InvalidRequest:
        return None
    if not isinstance(parsed.target, SamplingSessionId):
        return None
    return str(parsed.target), batched_futures.client_of(parsed.seq_id)
