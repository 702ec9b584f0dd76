"""Results of requests: final bytes, kept until some time after they were first read.

A result is not dropped when it is read, because the answer may have been lost on its way and the
SDK then asks again. Waiters are woken by the result itself.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tinkercloud_protocol.errors import NotFound
from tinkercloud_protocol.futures import Result
from tinkercloud_protocol.launch import Timings

_DELIVERY_SECONDS = 120.0
"""How long after an answer was sent its receiver may ask for it again: the SDK's own time-out (45)
and its longest pause (30), with some to spare."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A result to be kept by another process."""

    request_id: str
    digest: bytes
    result: Result
    is_read: bool
    """Whether a client has been given it."""


@dataclass(slots=True)
class _Entry:
    digest: bytes
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    read_at: float | None = None


class Results:
    """Results by request id. Belongs to one event loop."""

    def __init__(
        self,
        timings: Timings,
        max_bytes: int,
        *,
        now: Callable[[], float],
        on_drop: Callable[[str], None] = lambda _request_id: None,
    ) -> None:
        """Make an empty store.

        Args:
            timings: how long results are kept.
            max_bytes: of all results together; beyond it, the first read go first.
            now: a clock in seconds that never goes back.
            on_drop: told the id of each result that is no longer kept.
        """
        self._timings = timings
        self._max_bytes = max_bytes
        self._now = now
        self._on_drop = on_drop
        self._entries: dict[str, _Entry] = {}
        self._of: dict[str, set[str]] = {}
        """Model or sampling session to the ids in `_entries` that are of it."""
        self._unread: OrderedDict[str, float] = OrderedDict()
        """Ids with a result that nobody has read, and when it came: the earliest first."""
        self._read: OrderedDict[str, float] = OrderedDict()
        """Ids with a result that was read, and when: the earliest first."""
        self._bytes = 0
        self._unread_bytes = 0
        self._is_frozen = False
        self._released = asyncio.Event()

    def open(self, request_id: str, digest: bytes) -> bool:
        """Expect a result; return False if this id was opened before."""
        if request_id in self._entries:
            return False
        self._entries[request_id] = _Entry(digest)
        self._of.setdefault(_target(request_id), set()).add(request_id)
        return True

    @property
    def has_room(self) -> bool:
        """Whether the results that nobody has read are fewer bytes than may be kept."""
        return self._unread_bytes < self._max_bytes

    def digest(self, request_id: str) -> bytes | None:
        """Return the content digest an id was opened with; None if it is unknown."""
        entry = self._entries.get(request_id)
        return entry.digest if entry is not None else None

    def finish(self, request_id: str, result: Result) -> None:
        """Store a result and wake its waiters. A second result for one id is ignored."""
        entry = self._entries.get(request_id)
        if entry is None or entry.result is not None:
            return
        entry.result = result
        entry.finished.set()
        self._bytes += len(result.body)
        if entry.read_at is None:
            self._unread_bytes += len(result.body)
            self._unread[request_id] = self._now()
        else:
            entry.read_at = self._read[request_id] = self._now()

    async def wait(self, request_id: str, seconds: float) -> Result | None:
        """Return a result once it is there; None if it is not within `seconds`.

        Raises:
            NotFound: the id was never opened, or its result is no longer kept.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            raise NotFound(
                f"request {request_id!r} is unknown here: it was never sent, or its result is no"
                f" longer kept ({self._timings.result_ttl_seconds:.0f} s after it was first read)"
            )
        try:
            async with asyncio.timeout(seconds):
                await entry.finished.wait()
                if self._is_frozen:
                    await self._released.wait()
        except TimeoutError:
            return None
        if self._is_frozen:
            return None
        if entry.result is not None:
            self._mark_read(request_id, entry)
        return entry.result

    def freeze(self) -> None:
        """Stop giving out results: another process would not know of those read from now on."""
        self._is_frozen = True

    def export(self, is_wanted: Callable[[str], bool]) -> list[Kept]:
        """Return the results that somebody may still ask for, of the ids that are wanted.

        Those were not read yet, or so lately that the answer may be lost on its way.
        """
        since = self._now() - _DELIVERY_SECONDS
        return [
            Kept(request_id, entry.digest, entry.result, entry.read_at is not None)
            for request_id, entry in self._entries.items()
            if entry.result is not None
            and (entry.read_at is None or entry.read_at > since)
            and is_wanted(request_id)
        ]

    def restore(self, kept: Kept) -> None:
        """Keep a result of another process."""
        self.open(kept.request_id, kept.digest)
        self.finish(kept.request_id, kept.result)
        if kept.is_read:
            self.mark_read(kept.request_id)

    def unfinished(self) -> list[str]:
        """Return the ids whose results are not there yet."""
        return [name for name, entry in self._entries.items() if entry.result is None]

    def release(self) -> None:
        """Wake all waiters, with or without a result."""
        self._released.set()
        for entry in self._entries.values():
            entry.finished.set()

    def mark_read(self, request_id: str) -> None:
        """Note that a client knows this result without having asked for it."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._mark_read(request_id, entry)

    def _mark_read(self, request_id: str, entry: _Entry) -> None:
        if entry.read_at is not None:
            return
        entry.read_at = self._now()
        if entry.result is not None:
            del self._unread[request_id]
            self._unread_bytes -= len(entry.result.body)
            self._read[request_id] = entry.read_at

    def give_up(self, target: str) -> None:
        """Keep a model's or a sampling session's results no longer than those that were read.

        Its client is gone, or done.
        """
        for request_id in self._of.get(target, ()):
            self._mark_read(request_id, self._entries[request_id])

    def discard(self, target: str) -> None:
        """Forget a model's or a sampling session's results, which another place keeps."""
        for request_id in list(self._of.get(target, ())):
            self._unread_bytes -= self._size_if_unread(request_id)
            self._read.pop(request_id, None)
            self._drop(request_id)

    def _size_if_unread(self, request_id: str) -> int:
        result = self._entries[request_id].result
        was_unread = self._unread.pop(request_id, None) is not None
        return len(result.body) if was_unread and result is not None else 0

    def bytes_of(self, target: str) -> int:
        """Return the bytes of a model's or a sampling session's results."""
        results = [self._entries[name].result for name in self._of.get(target, ())]
        return sum(len(result.body) for result in results if result is not None)

    def was_read(self, request_id: str) -> bool:
        """Whether a client has been given this result."""
        entry = self._entries.get(request_id)
        return entry is None or entry.read_at is not None

    def sweep(self) -> None:
        """Drop what has been kept long enough, and the first read of what is too much."""
        now, timings = self._now(), self._timings
        while self._unread:
            request_id, finished_at = next(iter(self._unread.items()))
            if now - finished_at <= timings.unread_result_ttl_seconds:
                break
            del self._unread[request_id]
            self._unread_bytes -= self._drop(request_id)
        while self._read:
            request_id, read_at = next(iter(self._read.items()))
            is_over = now - read_at > timings.result_ttl_seconds
            if not is_over and self._bytes <= self._max_bytes:
                break
            del self._read[request_id]
            self._drop(request_id)

    def _drop(self, request_id: str) -> int:
        """Forget a result; return its size in bytes."""
        entry, target = self._entries.pop(request_id), _target(request_id)
        self._of[target].discard(request_id)
        if not self._of[target]:
            del self._of[target]
        size = len(entry.result.body) if entry.result is not None else 0
        self._bytes -= size
        self._on_drop(request_id)
        return size


def _target(request_id: str) -> str:
    return request_id.rpartition(":")[0]
