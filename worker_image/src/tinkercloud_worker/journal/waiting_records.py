"""The records of runs that wait to be copied to the object store."""

import asyncio
import time
from collections.abc import Callable

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_worker.journal.records import HEADER_BYTES, Record


class WaitingRoom:
    """Limits the requests of all runs of a head that wait for the store."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty.

        Args:
            max_bytes: their size. Beyond it, those of the run with most of them are dropped.
        """
        self._max_bytes = max_bytes
        self._used: dict[WaitingRecords, int] = {}

    def has(self, run: "WaitingRecords", num_bytes: int) -> None:
        """Record how many bytes of a run wait; drop those of the largest until the rest fits."""
        self._used.pop(run, None)
        if num_bytes:
            self._used[run] = num_bytes
        while sum(self._used.values()) > self._max_bytes:
            largest = max(self._used, key=self._used.__getitem__)
            largest.drop(
                "the checkpoint store is slower than the requests of the head"
                f" (durability.max_waiting_bytes is {self._max_bytes})"
            )


class WaitingRecords:
    """The waiting records of one run, in order. Belongs to one event loop."""

    def __init__(
        self,
        room: WaitingRoom,
        config: DurabilityConfig,
        *,
        drop: Callable[[str], None],
        on_due: Callable[[], None],
    ) -> None:
        """Start without records.

        Args:
            room: of the head.
            config: when records are copied.
            drop: called with the reason if they take too much room; it calls `clear`.
            on_due: called when they may have waited for long enough (`wake_when_due`).
        """
        self._room = room
        self._config = config
        self.drop = drop
        """Called with the reason if they take too much room."""
        self._on_due = on_due
        self._records: list[Record] = []
        self._num_bytes = 0
        self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: Record) -> None:
        """Add a record."""
        if not self._records:
            self._due_at = time.monotonic() + self._config.store_seconds
        self._records.append(record)
        self._num_bytes += _size(record)
        self._room.has(self, self._num_bytes)

    @property
    def are_due(self) -> bool:
        """Whether they have waited for long enough, or are many."""
        is_large = self._num_bytes >= self._config.store_bytes
        return is_large or time.monotonic() >= self._due_at

    def wake_when_due(self) -> None:
        """Call `on_due` once the first of them has waited for long enough.

        The timer may have been started for earlier records, which were copied for their size.
        """
        if self._timer is None:
            seconds = max(self._due_at - time.monotonic(), 0)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._timer_ended)

    def _timer_ended(self) -> None:
        self._timer = None
        self._on_due()

    def take(self) -> list[Record]:
        """Remove the records of the next object, and return them."""
        size, count = 0, 0
        while count < len(self._records) and size < self._config.store_bytes:
            size += _size(self._records[count])
            count += 1
        taken = self._records[:count]
        self._keep(self._records[count:])
        return taken

    def put_back(self, taken: list[Record]) -> None:
        """Undo `take`."""
        self._keep([*taken, *self._records])

    def drop_before(self, index: int) -> None:
        """Remove the records before the one of an index."""
        self._keep([each for each in self._records if each.index >= index])

    def clear(self) -> None:
        """Remove all records."""
        self._keep([])

    def _keep(self, records: list[Record]) -> None:
        self._records, self._num_bytes = records, sum(map(_size, records))
        self._room.has(self, self._num_bytes)

    def close(self) -> None:
        """Remove all records, and call nothing any more."""
        self.clear()
        if self._timer is not None:
            self._timer.cancel()


def _size(record: Record) -> int:
    return len(record.body) + HEADER_BYTES
