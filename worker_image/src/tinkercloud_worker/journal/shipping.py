"""Copies one run's journal to the object store while the run trains.

Records are added as they are written to the local journal, and copied in order, many in one object.
One object is written at a time; until it is known to exist, the same object is written again, so
that no failure leaves a gap. A store that does not respond stops no training: whatever waits for a
copy continues, and the run says so (`failure`) until everything has been copied. If more waits than
may, it is dropped, and a snapshot has to replace it (`needs_snapshot`).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from itertools import takewhile

import structlog

from tinkercloud_protocol.heads import journal_copy
from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.journal_copy import Base, Header
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_worker.checkpoints.store import CheckpointStore, StoreFailed
from tinkercloud_worker.journal import records
from tinkercloud_worker.journal.records import Record
from tinkercloud_worker.journal.shared_log import Fenced, LogPlace, SharedLog
from tinkercloud_worker.journal.waiting_records import WaitingRecords, WaitingRoom

log = structlog.get_logger(__name__)

_FIRST_RETRY_SECONDS = 1.0
_LAST_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Listeners:
    """What to call when something has changed."""

    on_change: Callable[[], None]
    """`failure` or `needs_snapshot` has changed."""
    on_fenced: Callable[[], None]
    """Another head has taken over. No result that waits for a copy is given from then on."""


@dataclass(frozen=True, slots=True)
class _Object:
    """An object that is written until it is known to exist."""

    content: bytes
    next_index: int
    base: Base | None


class _OwnObjects:
    """The objects of a journal that this head has written, in order."""

    def __init__(self, shared: SharedLog) -> None:
        self._shared = shared
        self._written: deque[tuple[int, int]] = deque()
        """Their numbers, and the indexes of the records after them."""
        self._base_number = 0
        """Number of the newest one with a base."""

    def add(self, number: int, written: _Object) -> None:
        self._written.append((number, written.next_index))
        if written.base is not None:
            self._base_number = number

    async def remove_before(self, first_index: int, fences: Collection[int]) -> None:
        """Delete objects whose records the newest base has, except fences; of earlier heads too."""
        superseded = takewhile(
            lambda each: each[1] <= first_index and each[0] < self._base_number, self._written
        )
        own, old = self._written[0][0], [number for number, _ in superseded]
        earlier = [number for number in await self._shared.numbers() if number < own]
        await self._shared.remove(set(earlier).difference(fences).union(old))
        while old and self._written[0][0] <= old[-1]:
            self._written.popleft()


class Shipping:
    """The copy of one run's journal. Belongs to one event loop."""

    def __init__(
        self,
        shared: SharedLog,
        manifest: JournalManifest,
        config: DurabilityConfig,
        *,
        room: WaitingRoom,
        begin: Callable[[], Awaitable[LogPlace]],
        listeners: Listeners,
        place: LogPlace | None,
    ) -> None:
        """Start to copy.

        Args:
            shared: the journal in the store.
            manifest: names this head as the last one.
            config: when to copy.
            room: of the head.
            begin: makes this head the only one that writes the journal.
            listeners: what to call.
            place: the result of `begin`; None if it could not be called yet. Then it is called as
                soon as the store responds, and a snapshot is needed.
        """
        self._shared = shared
        self._manifest = manifest
        self._config = config
        self._begin = begin
        self._listeners = listeners
        self._place = place
        self._has_work = asyncio.Event()
        self._has_work.set()
        self._pending = WaitingRecords(
            room, config, drop=self.require_snapshot, on_due=self._has_work.set
        )
        self._object: _Object | None = None
        self._base: Base | None = None
        """A base that is written before the next records."""
        self._is_writing_base = False
        self._written_base: Base | None = None
        """The base that was written last."""
        self._has_tried = asyncio.Event()
        """Set once a base has been written, or an attempt to write anything has failed."""
        self._lacks_base = self._is_dropping = place is None
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._callers: set[asyncio.Event] = set()
        """Those that wait in `shipped`."""
        self._own = _OwnObjects(shared)
        self._last_index = -1
        self._complete_at: int | None = None
        """After a failure: the record with which the copy is complete again."""
        self._is_fenced = False
        self._ended = asyncio.Event()
        self.failure = None if place is not None else "the checkpoint store does not respond"
        """Why the store does not have all requests that it should have; None if it has."""
        self._task = asyncio.create_task(self._work())

    @property
    def needs_snapshot(self) -> bool:
        """Whether the store responds, and only a snapshot can make the copy complete again."""
        return self._lacks_base and self._place is not None and self._object is None

    def append(self, record: Record) -> None:
        """Copy a record, in order."""
        self._last_index = record.index
        if self._is_dropping or self._ended.is_set():
            return
        self._pending.append(record)
        if self._is_due():
            self._has_work.set()
        else:
            self._pending.wake_when_due()

    def _is_due(self) -> bool:
        is_urgent = self._config.wait_for_store or self.failure is not None
        return is_urgent or self._pending.are_due

    def require_snapshot(self, reason: str) -> None:
        """Copy nothing until a snapshot has been stored."""
        self._pending.clear()
        self._lacks_base = self._is_dropping = True
        self._fail(reason)

    def when_shipped(self, index: int, act: Callable[[], None]) -> None:
        """Call something once the store has the record of an index, or does not respond.

        Calls are made in the order of these requests; none once another head has taken over.
        """
        self._waiting.append((index, act))
        self._release()

    async def shipped(self) -> None:
        """Return once the store has all records so far, or does not respond.

        Raises:
            Fenced: another head has taken over.
        """
        done = asyncio.Event()
        self.when_shipped(self._last_index, done.set)
        self._callers.add(done)
        try:
            if not self._is_fenced:
                await done.wait()
        finally:
            self._callers.discard(done)
        if self._is_fenced:
            raise Fenced

    async def check_owned(self) -> None:
        """Check that no other head has written to the journal, as far as the store responds.

        Raises:
            Fenced: one has.
        """
        if self._is_fenced:
            raise Fenced
        if self._place is None:
            # What is there is older.
            return
        try:
            last = await self._shared.last()
        except WireError:
            return
        if last is not None and last[1].manifest.generations[-1] != self._manifest.generations[-1]:
            raise Fenced

    def begin_snapshot(self, first_index: int) -> None:
        """Keep the records from this index on, which a snapshot taken now does not have."""
        if self._lacks_base and not self._is_writing_base:
            # Otherwise the records after the base that is being written are needed too.
            self._is_dropping = False
            self._pending.drop_before(first_index)

    async def replace(
        self,
        snapshot: SuspendedManifest,
        first_index: int,
        source: CheckpointStore,
        target: CheckpointStore,
    ) -> None:
        """Copy a snapshot, which replaces the journal so far.

        Args:
            snapshot: the snapshot.
            first_index: index of the first record that it does not have.
            source: where its files are.
            target: where they are to be.

        Raises:
            StoreFailed: an attempt to copy it has failed; the journal continues without it, unless
                the attempt succeeds later.
        """
        self._check_room()
        # If another head takes over after this, the base is not appended, and nothing is deleted.
        superseded = set(await self._shared.snapshot_keys())
        for name in snapshot.files:
            if self._has_stopped:
                raise StoreFailed("the journal has ended")
            content = await source.read_file(snapshot, name)
            await target.put_suspended(snapshot, name, content)
        self._check_room()
        base = self._base = Base(snapshot=snapshot, first_index=first_index)
        self._has_tried.clear()
        self._has_work.set()
        if not self._has_stopped:
            await self._has_tried.wait()
        if self._base is base:
            # Records that it does not have may be dropped from here on.
            self._base = None
        if self._has_stopped:
            raise StoreFailed("the journal has ended")
        if self._written_base is not base:
            raise StoreFailed(self.failure or "the checkpoint store failed")
        await self._shared.remove_files(sorted(superseded - snapshot.object_keys))
        await self._own.remove_before(first_index, self._place.fences if self._place else ())

    def _check_room(self) -> None:
        if self._is_dropping or self._place is None:
            raise StoreFailed("more requests arrived than can wait for the checkpoint store")

    @property
    def _has_stopped(self) -> bool:
        return self._is_fenced or self._ended.is_set()

    async def _work(self) -> None:
        seconds = _FIRST_RETRY_SECONDS
        while not self._has_stopped:
            try:
                self._has_work.clear()
                if not await self._step():
                    await self._has_work.wait()
                seconds = _FIRST_RETRY_SECONDS
            except Fenced:
                self._take_note_of_fence()
            except Exception as error:  # noqa: BLE001 - any failure leaves the run training
                self._fail(error.message if isinstance(error, WireError) else repr(error))
                await self._pause(seconds)
                seconds = min(2 * seconds, _LAST_RETRY_SECONDS)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return

    async def _step(self) -> bool:
        """Write one object, if one is due; return whether more may be."""
        if self._place is None:
            self._place = await self._begin()
            self._listeners.on_change()
        if self._object is None:
            self._object = await self._next(self._place)
        if self._object is None:
            return False
        await self._shared.append(self._place.number, self._object.content)
        self._wrote(self._place, self._object)
        return True

    async def _next(self, place: LogPlace) -> _Object | None:
        index, taken, base = place.next_index, list[Record](), self._base
        self._is_writing_base = base is not None
        if base is not None:
            self._base = None
            index = base.first_index if self._lacks_base else index
        elif self._lacks_base or not self._pending:
            return None
        elif not self._is_due():
            # They may have been due when they were added: during a failure, all are.
            self._pending.wake_when_due()
            return None
        else:
            taken = self._pending.take()
            index = taken[0].index
        header = Header(
            manifest=self._manifest,
            start_index=index,
            next_index=index + len(taken),
            base=base,
            fences=place.fences,
        )
        try:
            content = await asyncio.to_thread(
                lambda: journal_copy.encode(header, b"".join(map(records.encode, taken)))
            )
        except Exception:
            if not self._lacks_base:
                # Otherwise the copy would have a gap.
                self._pending.put_back(taken)
            raise
        return _Object(content, header.next_index, base)

    def _wrote(self, place: LogPlace, written: _Object) -> None:
        self._object, number = None, place.number
        self._place = replace(place, number=number + 1, next_index=written.next_index)
        self._own.add(number, written)
        self._is_writing_base = False
        if written.base is not None:
            # More requests than may wait can have arrived while it was written.
            self._lacks_base = self._is_dropping
            self._written_base = written.base
            if self._base is None:
                self._has_tried.set()
        if self.failure is not None:
            if self._complete_at is None:
                self._complete_at = self._last_index
            if not self._lacks_base and written.next_index > self._complete_at:
                log.info(
                    "the checkpoint store has a run's journal again", model_id=self._shared.run_id
                )
                self.failure = self._complete_at = None
            self._listeners.on_change()
        self._release()

    def _fail(self, reason: str) -> None:
        is_new, self.failure = self.failure is None, reason
        self._complete_at = None
        self._has_tried.set()
        if is_new:
            log.warning(
                "a run's journal can't be copied to the checkpoint store; training continues",
                model_id=self._shared.run_id,
                reason=reason,
            )
        self._release()
        self._listeners.on_change()

    def _release(self) -> None:
        while self._waiting and self._may_continue(self._waiting[0][0]):
            self._waiting.popleft()[1]()

    def _may_continue(self, index: int) -> bool:
        if self._is_fenced:
            return False
        is_copied = self._place is not None and index < self._place.next_index
        return is_copied or self.failure is not None or self._ended.is_set()

    def _take_note_of_fence(self) -> None:
        self._is_fenced = True
        self._has_tried.set()
        log.warning("another head has taken over a run", model_id=self._shared.run_id)
        self._listeners.on_fenced()
        for done in self._callers:
            done.set()

    def close(self) -> None:
        """Copy nothing more. Idempotent."""
        self._ended.set()
        self._pending.close()
        self._has_work.set()
        self._has_tried.set()
        self._release()

    async def closed(self) -> None:
        """Copy nothing more, and return once nothing is being written."""
        self.close()
        await asyncio.wait({self._task})
