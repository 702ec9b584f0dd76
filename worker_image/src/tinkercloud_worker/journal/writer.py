"""Appends records to a run's journal, many with one write, and many with one fsync.

Two loops run side by side: one writes all records that have arrived since its last write, the other
synchronizes all that were written since its last fsync. So a record waits for no fsync before it is
written, and computing continues during both.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from tinkercloud_worker.journal import records
from tinkercloud_worker.journal.folder import JournalFolder, Segment
from tinkercloud_worker.journal.records import Entry, Record

T = TypeVar("T")


class JournalWriter:
    """Writes one run's journal from one segment on. Belongs to one event loop."""

    def __init__(
        self,
        folder: JournalFolder,
        threads: ThreadPoolExecutor,
        *,
        number: int,
        next_index: int,
        fsync: bool,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Start; the segment is created with the first write.

        Args:
            folder: the run's folder.
            threads: where files are written.
            number: number of the first segment.
            next_index: index of the first record.
            fsync: whether a record is durable only once it is on the disk.
            on_failure: called once if writing fails. Nothing is written from then on.
        """
        self._folder = folder
        self._threads = threads
        self._fsync = fsync
        self._on_failure = on_failure
        self._number = number
        self._starts: deque[tuple[int, int]] = deque([(next_index, number)])
        """Indexes of the first records of segments that do not exist yet, and their numbers."""
        self._segment: Segment | None = None
        self._next_index = next_index
        self._pending: list[Record] = []
        self._written = self._durable = next_index - 1
        """Indexes of the last records that were written, and are durable."""
        self._has_pending = asyncio.Event()
        self._has_written = asyncio.Event()
        self._waiting_for_write: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._waiting_for_disk: deque[tuple[int, Callable[[], None]]] = deque()
        self.size_bytes = 0
        """Bytes of the records that were appended since the last `rotate`."""
        self.has_failed = False
        """Whether writing has failed."""
        self._in_use = asyncio.Lock()
        """Held while the segment must stay the same."""
        self._loops = [asyncio.create_task(self._write()), asyncio.create_task(self._synchronize())]
        self._closing: asyncio.Task[None] | None = None

    @property
    def last_index(self) -> int:
        """Index of the last record that was appended."""
        return self._next_index - 1

    def append(self, entry: Entry, body: bytes) -> int:
        """Append a record; return its index."""
        record = Record(self._next_index, entry, body)
        self._next_index += 1
        self.size_bytes += len(body) + records.HEADER_BYTES
        if not self.has_failed:
            self._pending.append(record)
            self._has_pending.set()
        return record.index

    async def written(self) -> None:
        """Return once all records so far would survive the end of this process."""
        if self._written < self.last_index and not self.has_failed:
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting_for_write.append((self.last_index, written))
            await written

    def when_durable(self, index: int, act: Callable[[], None]) -> None:
        """Call something once the record of this index is durable, or once writing has failed.

        Calls are made in the order of these requests.
        """
        self._waiting_for_disk.append((index, act))
        self._release()

    def rotate(self) -> int:
        """Write later records to a new segment; return its number."""
        self._number += 1
        self._starts.append((self._next_index, self._number))
        self.size_bytes = 0
        return self._number

    async def _write(self) -> None:
        while not self.has_failed:
            await self._has_pending.wait()
            self._has_pending.clear()
            taken = self._take()
            if not taken:
                continue
            try:
                await self._write_taken(taken)
            except Exception as error:  # noqa: BLE001 - requests must not wait forever
                self._fail(error)
                return
            self._written = taken[-1].index
            if not self._fsync:
                self._durable = self._written
            self._has_written.set()
            self._release()

    def _take(self) -> list[Record]:
        """Take the records of the same segment that are pending."""
        first = self._pending[0].index if self._pending else 0
        end = next((start for start, _ in self._starts if start > first), None)
        count = len(self._pending) if end is None else min(end - first, len(self._pending))
        taken, self._pending = self._pending[:count], self._pending[count:]
        if self._pending:
            self._has_pending.set()
        return taken

    async def _write_taken(self, taken: list[Record]) -> None:
        while self._starts and self._starts[0][0] <= taken[0].index:
            _, number = self._starts.popleft()
            if not self._starts or self._starts[0][0] > taken[0].index:
                async with self._in_use:
                    await self._in_thread(partial(self._replace_segment, number))
        segment = self._segment
        assert segment is not None  # noqa: S101 - the first write creates it
        # One call: each costs a small request as much as the writing itself.
        await self._in_thread(lambda: segment.write(b"".join(map(records.encode, taken))))

    def _replace_segment(self, number: int) -> None:
        if self._segment is not None:
            replaced, self._segment = self._segment, None
            replaced.synchronize()
            replaced.close()
        self._segment = self._folder.create(number)

    async def _synchronize(self) -> None:
        while self._fsync and not self.has_failed:
            await self._has_written.wait()
            self._has_written.clear()
            async with self._in_use:
                written, segment = self._written, self._segment
                if segment is None or written == self._durable:
                    continue
                try:
                    await self._in_thread(segment.synchronize)
                except Exception as error:  # noqa: BLE001 - requests must not wait forever
                    self._fail(error)
                    return
            self._durable = written
            self._release()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _release(self) -> None:
        while self._waiting_for_write and self._reached(
            self._waiting_for_write[0][0], self._written
        ):
            _, future = self._waiting_for_write.popleft()
            if not future.done():
                future.set_result(None)
        while self._waiting_for_disk and self._reached(self._waiting_for_disk[0][0], self._durable):
            _, act = self._waiting_for_disk.popleft()
            act()

    def _reached(self, index: int, reached: int) -> bool:
        return self.has_failed or index <= reached

    def _fail(self, error: Exception) -> None:
        if self.has_failed:
            return
        self.has_failed = True
        self._pending.clear()
        self._on_failure(error)
        self._release()

    def close(self) -> None:
        """Write nothing from now on. Idempotent."""
        self.has_failed = True
        self._pending.clear()
        self._has_pending.set()
        self._has_written.set()
        self._release()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        # A thread may still be writing: its descriptor must not become another file's.
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._segment is not None:
            self._segment.close()
