"""Requests of a model that were sent without a seq_id: their order and their idempotency keys.

Such a request runs after everything that arrived before it. It takes the number after the highest
one of its model that is known, so that requests with and without a number can be mixed.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest, Overloaded
from tinkercloud_worker.head.order.sequencer import MAX_AHEAD, Sequencer


class Arrivals:
    """Keeps each model's requests in the order of their arrival while they are parsed."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, target: str) -> AsyncIterator[None]:
        """Wait until all requests of a model that arrived earlier are queued."""
        turn = self._turns.get(target)
        if turn is None:
            turn = self._turns[target] = asyncio.Lock()
        async with turn:
            yield


class GivenNumbers:
    """The numbers that one model's requests without a seq_id were given."""

    def __init__(self, sequencer: Sequencer) -> None:
        self._sequencer = sequencer
        self._by_key: dict[str, int] = {}
        self._keys: dict[int, str] = {}

    def number(self, key: str | None, digest: bytes) -> int:
        """Return the number of a request: a free one, or its own if it is repeated.

        Args:
            key: its idempotency key; a request without one is always a new request.
            digest: equal for equal content.

        Raises:
            InvalidRequest: the key was used with other content.
            Overloaded: too many requests of the model wait.
        """
        sequencer = self._sequencer
        known = self._by_key.get(key) if key is not None else None
        if known is not None:
            if not sequencer.has(known, digest):
                raise InvalidRequest(
                    f"{routes.IDEMPOTENCY_HEADER}: {key!r} was already used for request {known} of"
                    " this model, which has different content; give each request its own key"
                )
            return known
        free = sequencer.free_seq_id
        if free > sequencer.lowest_seq_id + MAX_AHEAD:
            raise Overloaded(
                f"{MAX_AHEAD} requests of this model wait; retrieve some results before sending"
                " more"
            )
        return free

    def record(self, seq_id: int, key: str | None) -> None:
        """Record that a request was queued under a number."""
        self._sequencer.gives_numbers = True
        if key is not None:
            self._by_key[key] = seq_id
            self._keys[seq_id] = key

    def forget(self, seq_id: int) -> None:
        """Forget the key of a request whose result is no longer kept."""
        if (key := self._keys.pop(seq_id, None)) is not None:
            del self._by_key[key]

    @property
    def keys(self) -> Mapping[str, int]:
        """The numbers by idempotency key."""
        return dict(self._by_key)
