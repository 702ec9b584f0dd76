"""The journal and the snapshots of one model that survives the end of its head.

Every request is written to the journal as it was received, before it is confirmed to the client.
Now and then a snapshot replaces the journal so far. Another head continues from the snapshot and
repeats the requests after it, which gives the same state and the same results.

If the disk fails, training continues in memory and the run is degraded: it is then no safer than
without a journal, and says so. A snapshot ends that, as soon as one can be written.

Journal and snapshots may also be copied to the object store (`journal.shipping`). If the store
fails, the run is degraded too, but still survives the end of the process.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field

import structlog

from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_worker import metrics
from tinkercloud_worker.head.durable.journal_room import NoRoom, RoomShare
from tinkercloud_worker.head.durable.run_copy import RunCopy
from tinkercloud_worker.head.durable.snapshots import Abandoned, Snapshot, Snapshots
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.model.save_schedule import SavePoint, SnapshotSchedule
from tinkercloud_worker.head.order.attempts import Attempts
from tinkercloud_worker.head.order.journal_entries import JournalEntries
from tinkercloud_worker.head.order.queued_request import QueuedRequest
from tinkercloud_worker.head.wire.failed_results import disk_failure
from tinkercloud_worker.journal.folder import JournalFolder
from tinkercloud_worker.journal.records import Record
from tinkercloud_worker.journal.shipping import Shipping
from tinkercloud_worker.journal.writer import JournalWriter

log = structlog.get_logger(__name__)

_PATIENCE_SECONDS = 20.0
"""How long `change_kept` waits for a snapshot: less than the API server waits for a response."""


@dataclass(eq=False)
class LocalJournal:
    """The requests of a run on the local disk, in segments, and the manifest.

    No head continues a journal without its manifest.
    """

    folder: JournalFolder
    manifest: JournalManifest
    threads: ThreadPoolExecutor
    """Where files are written."""
    fsync: bool
    share: RoomShare
    """What the run has on the disk."""
    on_failure: Callable[[str], None] = lambda _: None
    """Called with the reason if writing fails. Nothing is written from then on, until another
    segment begins."""
    _number: int = field(default=1, init=False)
    _bytes_before: int = field(default=0, init=False)
    """Bytes of the segments before the last one."""

    def __post_init__(self) -> None:
        self.writer = self._open(0)
        """Writes the last segment."""

    def _open(self, next_index: int) -> JournalWriter:
        return JournalWriter(
            self.folder,
            self.threads,
            number=self._number,
            next_index=next_index,
            fsync=self.fsync,
            on_failure=self._failed,
        )

    def _failed(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else repr(error)
        self.on_failure(f"the journal can't be written ({reason or error})")

    @property
    def num_bytes(self) -> int:
        """Bytes of the requests that no snapshot has."""
        return self._bytes_before + self.writer.size_bytes

    def continue_after(self, number: int, index: int, num_bytes: int) -> None:
        """Continue after the segment and the record of these numbers, with so many bytes."""
        self._bytes_before = num_bytes
        self.writer.close()
        self._number = number + 1
        self.writer = self._open(index + 1)

    def begin_segment(self) -> None:
        """Write later requests to a new segment, also if writing the last one has failed."""
        if self.writer.has_failed:
            self._number += 1
            self.writer = self._open(self.writer.last_index + 1)
        else:
            self._bytes_before = self.num_bytes
            self._number = self.writer.rotate()

    async def remove_earlier(self) -> None:
        """Remove the segments before the last one, whose requests a snapshot has."""
        await self._in_thread(lambda: self.folder.remove_before(self._number))
        self._bytes_before = 0

    async def restore(self) -> None:
        """Write the manifest again after `withdraw`."""
        await self._in_thread(lambda: self.folder.write_manifest(self.manifest))
        if self.writer.has_failed:
            # It failed meanwhile: what it lacks is in memory only.
            await self._in_thread(self._withdraw)

    async def clear(self) -> None:
        """Delete what the disk has of the run, which is of no use."""
        await self._in_thread(lambda: self.folder.clear_before(self._number + 1))
        self._bytes_before = 0
        self.share.cleared()

    def withdraw(self) -> None:
        """Remove the manifest soon, so that no head continues from files that lack requests."""
        self.threads.submit(self._withdraw)

    def _withdraw(self) -> None:
        with suppress(OSError):
            self.folder.withdraw()

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.threads, work)


class DurableRun:
    """Implements `journal_interface.RequestLog` for one model. Belongs to one event loop."""

    def __init__(
        self,
        model: LiveModel,
        journal: LocalJournal,
        snapshots: Snapshots,
        *,
        config: DurabilityConfig,
        attempts: Attempts,
        on_change: Callable[[], None],
    ) -> None:
        """Create it; `start` begins writing.

        Args:
            model: the model.
            journal: its requests on the local disk.
            snapshots: takes and writes the snapshots.
            config: when to take them.
            attempts: counts the heads that its requests have ended.
            on_change: called when the run is degraded, and when it is durable again.
        """
        self._model, self._snapshots = model, snapshots
        self._name = str(model.model_id)
        self.share = journal.share
        """What the run has on the disk."""
        self.share.give_way = self._give_way
        self._config, self._journal = config, journal
        journal.on_failure = self.degrade
        self.attempts = attempts
        """The attempts to repeat its requests."""
        self._on_change = on_change
        is_wanted = model.spec.restore_from is not None
        self._schedule = SnapshotSchedule(config, model.spec.lora, is_wanted=is_wanted)
        self.copy = RunCopy(snapshots, self._schedule, wait_for_store=config.wait_for_store)
        """The copy of the run in the object store."""
        self._entries = JournalEntries()
        self._saving: asyncio.Task[None] | None = None
        self._clearing: asyncio.Task[None] | None = None
        self._files = asyncio.Lock()
        """Held while a snapshot is taken and written, and while files are deleted."""
        self._attempted = asyncio.Event()
        """Set after each attempt to write a snapshot."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.failure: str | None = None
        """Why the run would not survive the end of this process; None if it would."""
        self._lacks_room: str | None = None
        """Why no snapshot fits on the disk; until the journal is full, the run survives a kill."""

    @property
    def degraded(self) -> str | None:
        """Why the run is less safe than its level promises; None if it isn't."""
        return self.failure or self._lacks_room or self.copy.failure

    def ship(self, shipping: Shipping) -> None:
        """Copy the journal to the object store from now on."""
        self.copy.start(shipping)
        if self._journal.writer.last_index >= 0:
            shipping.require_snapshot("requests arrived before the checkpoint store was ready")

    def continue_after(self, number: int, index: int) -> None:
        """Continue a journal whose last segment and record have these numbers."""
        self._journal.continue_after(number, index, self.share.journal_bytes)
        # The last head may not have copied all of these requests, which are repeated now.
        self._entries.needed = index

    def append(self, queued: QueuedRequest) -> None:
        """See `RequestLog.append`."""
        source = queued.operation.source
        if source is None:
            # The manifest has what creates the model.
            return
        entry = self._entries.entry(queued, source.path)
        index = self._journal.writer.append(entry, source.body)
        self._entries.added(queued, index)
        self.copy.append(Record(index, entry, source.body))
        if not self._journal.writer.has_failed:
            self.share.set_journal(self._journal.num_bytes)
        metrics.JOURNAL_BYTES.inc(len(source.body))

    def record_key(self, seq_id: int, key: str | None) -> None:
        """See `RequestLog.record_key`."""
        self._entries.record_key(seq_id, key)

    def record_read(self, request_id: str) -> None:
        """See `RequestLog.record_read`."""
        self._entries.record_read(request_id)

    def note_change(self) -> None:
        """See `RequestLog.note_change`."""
        self._schedule.is_wanted = True

    async def change_kept(self) -> None:
        """See `RequestLog.change_kept`: it returns after the attempt to write a snapshot."""
        if self._is_closed or self._model.operations.refused is not None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while self._schedule.is_wanted or self._saving is not None:
                    self._attempted.clear()
                    await self._attempted.wait()
                    if self._schedule.failure is not None:
                        return

    async def accepted(self) -> None:
        """See `RequestLog.accepted`."""
        await self._journal.writer.written()
        await self.copy.shipped()

    async def settled(self) -> None:
        """See `RequestLog.settled`; it also returns if the journal has failed."""
        durable = asyncio.Event()
        self._journal.writer.when_durable(self._journal.writer.last_index, durable.set)
        await durable.wait()
        await self.copy.shipped()

    async def check_owned(self) -> None:
        """See `RequestLog.check_owned`."""
        await self.copy.check_owned()

    def release(self, seq_id: int, finish: Callable[[], None]) -> None:
        """See `RequestLog.release`."""
        if self._entries.finished(seq_id) == "load":
            self._schedule.is_wanted = True
        needed = self._entries.needed
        self._journal.writer.when_durable(needed, self.copy.continuation(needed, finish))

    def repeating(self, seq_id: int) -> AbstractAsyncContextManager[None]:
        """See `RequestLog.repeating`."""
        return self.attempts.repeating(seq_id)

    async def at_boundary(self) -> None:
        """See `RequestLog.at_boundary`: take a snapshot if one is due."""
        now = time.monotonic()
        self._schedule.count(now, self._model.operations.num_changes)
        self._check_size()
        due = self._due_at()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is None:
            return
        if due > now:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(due - now, self._model.queue.wake)
            return
        await self._begin_snapshot()

    @property
    def is_due_at_boundary(self) -> bool:
        """See `RequestLog.is_due_at_boundary`: whether a snapshot is due."""
        due = self._due_at()
        return due is not None and due <= time.monotonic()

    def _check_size(self) -> None:
        is_tried = self._schedule.failure is not None or self._saving is not None
        limit = 2 * self._config.max_journal_bytes
        if self.failure is None and is_tried and self._journal.num_bytes >= limit:
            self.degrade(
                f"the journal has {self._journal.num_bytes} bytes (durability.max_journal_bytes is"
                f" {self._config.max_journal_bytes}), and no snapshot could be written"
                f" ({self._schedule.failure or 'the last one is not complete'})"
            )

    def _due_at(self) -> float | None:
        """Return when the next snapshot is due; None if none is."""
        operations, queue = self._model.operations, self._model.queue
        if operations.refused is not None or self._saving is not None or self._is_closed:
            return None
        if queue.sequencer.next_seq_id == 0:
            # The model is still being created or restored.
            return None
        is_large = self._journal.num_bytes >= self._config.max_journal_bytes
        if queue.background and not is_large:
            # An upload that runs can't be part of a snapshot.
            return None
        return self._schedule.next_at(
            is_urgent=self.failure is not None or is_large,
            needs_copy=self.copy.needs_snapshot,
            has_gradient=self._entries.has_gradient,
        )

    async def _begin_snapshot(self) -> None:
        if self._model.queue.background:
            await asyncio.wait(self._model.queue.background)
        began = time.monotonic()
        point = self._schedule.begin(began)
        async with self._files:
            try:
                snapshot = await self._take()
            except Exception as error:  # noqa: BLE001 - any failure leaves the run training
                self._snapshot_failed(error, began)
                return
            if self._is_closed:
                return
            self._journal.begin_segment()
        self._schedule.is_wanted = False
        first_index = self._journal.writer.last_index + 1
        self.copy.begin_snapshot(first_index)
        self._saving = asyncio.create_task(self._save(snapshot, first_index, point))

    async def _take(self) -> Snapshot:
        await self.settled()
        if self.failure is not None:
            # A full disk may have room for the snapshot then.
            await self._journal.clear()
        self.share.check_snapshot()
        return await self._snapshots.take()

    async def _save(self, snapshot: Snapshot, first_index: int, point: SavePoint) -> None:
        began = time.monotonic()
        try:
            async with self._files:
                manifest = await self._write(snapshot)
        except Abandoned:
            self.share.discarded()
        except Exception as error:  # noqa: BLE001 - any failure leaves the run training
            self._schedule.is_wanted = True
            self.share.discarded()
            if self.failure is not None:
                self._journal.writer.close()
            self._snapshot_failed(error, began)
        else:
            self._schedule.saved(point)
            if not self._journal.writer.has_failed:
                self._schedule.retry.succeeded()
            metrics.SNAPSHOTS.inc()
            metrics.SNAPSHOT_SECONDS.observe(time.monotonic() - began)
            await self.copy.replace(manifest, first_index)
            self._schedule.rest(began, time.monotonic())
        finally:
            self._saving = None
            self._attempted.set()
            self._model.queue.wake()

    async def _write(self, snapshot: Snapshot) -> SuspendedManifest:
        manifest = await self._snapshots.write(snapshot)
        # Before the manifest exists again: a run that was degraded has a gap in these.
        await self._journal.remove_earlier()
        if self.failure is not None and not self._journal.writer.has_failed:
            await self._journal.restore()
        self.share.committed()
        self.share.set_journal(0 if self._journal.writer.has_failed else self._journal.num_bytes)
        if not self._journal.writer.has_failed and self.degraded is not None:
            log.info("a run is durable again", model_id=self._name)
            self.failure = self._lacks_room = None
            self._on_change()
        return manifest

    def _snapshot_failed(self, error: Exception, began: float) -> None:
        """Record a failed attempt that began at a time."""
        reason = disk_failure(error)
        self._schedule.attempt_failed(began, time.monotonic(), reason)
        if isinstance(error, NoRoom):
            self._lacks_room = reason
            self._on_change()
        self._attempted.set()
        metrics.SNAPSHOT_FAILURES.inc()
        log.warning(
            "a snapshot failed; training continues, and it is tried again",
            model_id=self._name,
            reason=reason,
        )

    def degrade(self, reason: str) -> None:
        """Continue without a journal until a snapshot succeeds."""
        if self._is_closed:
            return
        is_new, self.failure = self.failure is None, reason
        self._journal.writer.close()
        self._schedule.retry.failed(time.monotonic())
        if is_new:
            log.error(
                "a run is not durable any more; training continues, and a snapshot is tried again",
                model_id=self._name,
                reason=reason,
            )
        # A head that continued from it would not know what is in memory only.
        self._journal.withdraw()
        self._model.queue.wake()
        self._on_change()

    def _give_way(self, reason: str) -> None:
        if not self._is_closed:
            self.degrade(reason)
            self._clearing = asyncio.create_task(self._clear())

    async def _clear(self) -> None:
        async with self._files:
            # Otherwise a snapshot has started that replaces the files.
            if self._journal.writer.has_failed and not self._is_closed:
                with suppress(OSError):
                    await self._journal.clear()
            else:
                self.share.is_leaving = False

    async def closed(self) -> None:
        """Write nothing from now on, and return once nothing is being written."""
        saving = self._saving
        self._is_closed = True
        if saving is not None:
            self.copy.close()
            await asyncio.wait({saving})
        await self.copy.closed()
        self.close()
        if self._clearing is not None:
            await asyncio.wait({self._clearing})

    def close(self) -> None:
        """Write nothing from now on. Idempotent."""
        self._is_closed = True
        self._journal.writer.close()
        self.attempts.close()
        self.copy.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._saving is not None:
            self._saving.cancel()
