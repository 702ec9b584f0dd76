"""Results of requests as encoded bytes, kept for some time after they are first read.

A result is not dropped when it is read: the response may have been lost on the network, and the SDK
then polls again.

Each owner has a separate budget (`Limits.max_result_bytes`). Results over the budget are evicted in
this order: results that were read and delivered, unread samples (which can be sampled again),
results that were read recently. Unread training results are never evicted, because their requests
can't run again; while they fill the budget, `has_room` is false and no request that would add to
them runs.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, field

import structlog

from tinkercloud_protocol.heads.launch import Limits, Timings
from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.errors import NotFound, Overloaded, ResultGone
from tinkercloud_protocol.wire.future_responses import Result

log = structlog.get_logger(__name__)

_DELIVERY_SECONDS = 120.0
"""How long after a response was sent the client may poll for it again: the SDK's timeout (45) and
its longest backoff (30), with a margin."""


_FINISHED = asyncio.Event()
"""The event of all finished requests, since one of its own takes more memory than most results."""
_FINISHED.set()


@dataclass(frozen=True, slots=True)
class ExportedResult:
    """A result to be kept by another process."""

    request_id: str
    digest: bytes
    result: Result
    is_read: bool
    """Whether a client has read it."""


@dataclass(slots=True)
class _Entry:
    digest: bytes
    owner: str
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    read_at: float | None = None

    @property
    def size(self) -> int:
        return len(self.result.body) if self.result is not None else 0


@dataclass(slots=True)
class _Owned:
    """Ids of one owner's results, the earliest first, with the time of their last change."""

    num_bytes: int = 0
    read: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Read results, and when they were read."""
    samples: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Unread samples, and when they were finished."""
    training: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Unread training results, and when they were finished."""
    training_bytes: int = 0
    """Size of the results in `training`."""


class Results:
    """Results by request id. Belongs to one event loop."""

    def __init__(
        self,
        timings: Timings,
        max_bytes: int,
        *,
        now: Callable[[], float],
        on_drop: Callable[[str], None] = lambda _request_id: None,
        on_room: Callable[[str], None] = lambda _owner: None,
        on_read: Callable[[str], None] = lambda _request_id: None,
    ) -> None:
        """Create an empty store.

        Args:
            timings: how long results are kept.
            max_bytes: budget of one owner's results.
            now: a monotonic clock, in seconds.
            on_drop: called with the id of each result that is dropped.
            on_room: called with an owner whose `has_room` has become true.
            on_read: called with the id of each result that is read for the first time.
        """
        self._timings = timings
        self._max_bytes = max_bytes
        self._now = now
        self._on_drop = on_drop
        self._on_room = on_room
        self._on_read = on_read
        self._entries: dict[str, _Entry] = {}
        self._ids_by_target: dict[str, set[str]] = {}
        """Ids in `_entries` by model or sampling session."""
        self._owned: dict[str, _Owned] = {}
        """Results by owner."""
        self._is_frozen = False
        self._held_back: set[str] = set()
        """Models and sampling sessions whose results are not returned."""
        self._released = asyncio.Event()

    def open(self, request_id: str, digest: bytes, owner: str) -> bool:
        """Register an owner's request; return False if its id is already registered."""
        if request_id in self._entries:
            return False
        self._entries[request_id] = _Entry(digest, owner)
        self._ids_by_target.setdefault(_target(request_id), set()).add(request_id)
        return True

    def has_room(self, owner: str) -> bool:
        """Return whether an owner's unread training results are within the budget."""
        owned = self._owned.get(owner)
        return owned is None or owned.training_bytes < self._max_bytes

    def check_room(self, request_id: str, owner: str) -> None:
        """Check that an owner has room for the result of a batch; one that is known already has it.

        Raises:
            Overloaded: the owner's unread training results fill the budget.
        """
        if request_id not in self._entries and not self.has_room(owner):
            raise Overloaded(self.backlog(owner))

    def backlog(self, owner: str) -> str:
        """Describe the unread training results that fill an owner's budget, and what to do."""
        sizes: Counter[str] = Counter()
        owned = self._owned.get(owner, _Owned())
        for request_id in owned.training:
            sizes[_target(request_id)] += self._entries[request_id].size
        largest = ", ".join(f"{size} bytes for {target}" for target, size in sizes.most_common(3))
        return (
            f"the unread training results of owner {owner!r} take {owned.training_bytes} bytes"
            f" ({len(owned.training)} results; largest: {largest}); limits.max_result_bytes is"
            f" {self._max_bytes}. Retrieve them, or delete the sessions of clients that have"
            " stopped (`tinkercloud sessions delete SESSION`)"
        )

    def digest(self, request_id: str) -> bytes | None:
        """Return the content digest of a request; None if its id is unknown."""
        entry = self._entries.get(request_id)
        return entry.digest if entry is not None else None

    def finish(self, request_id: str, result: Result) -> None:
        """Store a result and wake its waiters. A second result for one id is ignored.

        Other results of the same owner may be evicted.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.result is not None:
            return
        entry.result = result
        entry.finished.set()
        entry.finished = _FINISHED
        owned = self._owned.setdefault(entry.owner, _Owned())
        owned.num_bytes += entry.size
        if entry.read_at is not None:
            entry.read_at = owned.read[request_id] = self._now()
        elif _is_sample(request_id):
            owned.samples[request_id] = self._now()
        else:
            owned.training[request_id] = self._now()
            owned.training_bytes += entry.size
        self._evict_to_fit(entry.owner, owned, latest=request_id)

    def _evict_to_fit(self, owner: str, owned: _Owned, latest: str) -> None:
        """Evict results of an owner that is over its budget, but never the latest one."""
        while owned.num_bytes > self._max_bytes:
            delivered_before = self._now() - _DELIVERY_SECONDS
            read, read_at = next(iter(owned.read.items()), (latest, 0.0))
            sample = next(iter(owned.samples), latest)
            if read != latest and read_at < delivered_before:
                self._drop(read)
            elif sample != latest:
                log.warning(
                    "an unread sample was evicted for newer results",
                    owner=owner,
                    request_id=sample,
                    num_bytes=self._entries[sample].size,
                    max_result_bytes=self._max_bytes,
                )
                self._drop(sample)
            elif read != latest:
                self._drop(read)
            else:
                return

    async def wait(
        self,
        request_id: str,
        seconds: float,
        max_bytes: int | None = None,
        *,
        counts_as_read: bool = True,
    ) -> Result | None:
        """Wait for a result; return None after `seconds`.

        Args:
            request_id: the request.
            seconds: how long to wait.
            max_bytes: size above which only the metadata of a result is returned, which does not
                count as reading it; None means that all of it is.
            counts_as_read: whether the result is kept for a shorter time from then on.

        Raises:
            NotFound: the id is unknown, or its result is no longer kept.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            raise NotFound(
                f"request {request_id!r} is unknown: it was never sent, or its result has"
                f" expired (results are kept for {self._timings.result_ttl_seconds:.0f} s after"
                f" they are first read, or {self._timings.unread_result_ttl_seconds:.0f} s if"
                " they are not read); after a restore from a backup, continue the run with"
                " `tinkercloud runs attach`"
            )
        try:
            async with asyncio.timeout(seconds):
                await entry.finished.wait()
                if self._is_frozen:
                    await self._released.wait()
        except TimeoutError:
            return None
        result = entry.result
        if self._is_frozen or result is None or _target(request_id) in self._held_back:
            return None
        if max_bytes is not None and len(result.body) > max_bytes:
            return future_responses.metadata_of(result)
        if counts_as_read:
            self._mark_read(request_id, entry)
        return result

    def hold_back(self, targets: Set[str]) -> None:
        """Return no results of these models and sampling sessions, which are being written."""
        self._held_back |= targets

    def give_out(self, targets: Set[str]) -> None:
        """Return results again after `hold_back`."""
        self._held_back -= targets

    def freeze(self) -> None:
        """Stop returning results: another process would not know which were read from now on."""
        self._is_frozen = True

    def export(self, is_wanted: Callable[[str], bool]) -> list[ExportedResult]:
        """Return the wanted results that a client may still poll for.

        These are unread, or were read so recently that the response may have been lost.
        """
        since = self._now() - _DELIVERY_SECONDS
        return [
            ExportedResult(request_id, entry.digest, entry.result, entry.read_at is not None)
            for request_id, entry in self._entries.items()
            if entry.result is not None
            and (entry.read_at is None or entry.read_at > since)
            and is_wanted(request_id)
        ]

    def restore(self, kept: ExportedResult, owner: str) -> None:
        """Add an owner's result from another process."""
        self.open(kept.request_id, kept.digest, owner)
        self.finish(kept.request_id, kept.result)
        if kept.is_read:
            self.mark_read(kept.request_id)

    def unfinished(self) -> list[str]:
        """Return the ids of unfinished requests."""
        return [name for name, entry in self._entries.items() if entry.result is None]

    def release(self) -> None:
        """Wake all waiters, with or without a result."""
        self._released.set()
        for entry in self._entries.values():
            entry.finished.set()

    def mark_read(self, request_id: str) -> None:
        """Mark a result as read by a client that received it in another way."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._mark_read(request_id, entry)

    def _mark_read(self, request_id: str, entry: _Entry) -> None:
        # The result may have been dropped while its waiter was resuming.
        if entry.read_at is not None or self._entries.get(request_id) is not entry:
            return
        entry.read_at = self._now()
        self._on_read(request_id)
        if entry.result is not None:
            self._unlist(request_id, entry)
            self._owned[entry.owner].read[request_id] = entry.read_at

    def _unlist(self, request_id: str, entry: _Entry) -> None:
        """Remove a result from its owner's list."""
        owned = self._owned[entry.owner]
        had_room = self.has_room(entry.owner)
        owned.read.pop(request_id, None)
        owned.samples.pop(request_id, None)
        if owned.training.pop(request_id, None) is not None:
            owned.training_bytes -= entry.size
        if not had_room and self.has_room(entry.owner):
            self._on_room(entry.owner)

    def abandon(self, target: str) -> None:
        """Mark all results of a model or sampling session as read: its client has gone."""
        for request_id in self._ids_by_target.get(target, ()):
            self._mark_read(request_id, self._entries[request_id])

    def discard(self, target: str) -> None:
        """Drop the results of a model or sampling session, which are stored elsewhere.

        Those that wait for them are woken, so that their clients poll again.
        """
        for request_id in list(self._ids_by_target.get(target, ())):
            waiters = self._entries[request_id].finished
            self._drop(request_id)
            waiters.set()

    def bytes_of(self, target: str) -> int:
        """Return the bytes of the results of a model or sampling session."""
        results = [self._entries[name].result for name in self._ids_by_target.get(target, ())]
        return sum(len(result.body) for result in results if result is not None)

    def was_read(self, request_id: str) -> bool:
        """Return whether a client has read this result."""
        entry = self._entries.get(request_id)
        return entry is None or entry.read_at is not None

    def forget_read(self, owner: str, min_age_seconds: float) -> int:
        """Drop the results of an owner that were read at least so long ago; return how many."""
        owned = self._owned.get(owner)
        if owned is None:
            return 0
        before = len(owned.read)
        latest = self._now() - min_age_seconds
        for request_id in [name for name, read_at in owned.read.items() if read_at <= latest]:
            self._drop(request_id)
        return before - len(owned.read)

    def sweep(self) -> None:
        """Drop expired results."""
        now, timings = self._now(), self._timings
        for owned in list(self._owned.values()):
            self._drop_before(owned.samples, now - timings.unread_result_ttl_seconds)
            self._drop_before(owned.training, now - timings.unread_result_ttl_seconds)
            self._drop_before(owned.read, now - timings.result_ttl_seconds)

    def _drop_before(self, ids: OrderedDict[str, float], moment: float) -> None:
        while ids:
            request_id, since = next(iter(ids.items()))
            if since >= moment:
                break
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        """Drop a result."""
        entry, target = self._entries.pop(request_id), _target(request_id)
        self._ids_by_target[target].discard(request_id)
        if not self._ids_by_target[target]:
            del self._ids_by_target[target]
        if entry.result is not None:
            self._unlist(request_id, entry)
            owned = self._owned[entry.owner]
            owned.num_bytes -= entry.size
            if not (owned.read or owned.samples or owned.training):
                del self._owned[entry.owner]
        self._on_drop(request_id)


def sample_gone(unknown: NotFound, owner: str, limits: Limits) -> ResultGone:
    """Return the error for a sample of an owner whose result is no longer kept."""
    return ResultGone(
        f"{unknown.message}, or it was evicted to make room for newer results of owner {owner!r}"
        f" (limits.max_result_bytes is {limits.max_result_bytes}); send the sampling request again"
    )


def _target(request_id: str) -> str:
    return request_id.rpartition(":")[0]


def _is_sample(request_id: str) -> bool:
    return ":sample:" in request_id
