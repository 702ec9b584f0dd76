"""The copy of one run in the object store, if the store has one."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import structlog

from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_worker import metrics
from tinkercloud_worker.head.durable.snapshots import Snapshots
from tinkercloud_worker.head.model.save_schedule import SnapshotSchedule
from tinkercloud_worker.head.wire.failed_results import Moved, error_message, to_result
from tinkercloud_worker.journal.records import Record
from tinkercloud_worker.journal.shared_log import Fenced
from tinkercloud_worker.journal.shipping import Shipping

log = structlog.get_logger(__name__)


class RunCopy:
    """Copies the journal and the snapshots of a run, once `start` is called."""

    def __init__(
        self, snapshots: Snapshots, schedule: SnapshotSchedule, *, wait_for_store: bool
    ) -> None:
        """Copy nothing yet; `wait_for_store` is that of `DurabilityConfig`."""
        self._snapshots = snapshots
        self._name = str(snapshots.model.model_id)
        self._schedule = schedule
        self._wait_for_store = wait_for_store
        self._shipping: Shipping | None = None

    def start(self, shipping: Shipping) -> None:
        """Copy from now on."""
        self._shipping = shipping

    @property
    def failure(self) -> str | None:
        """Why the store lacks some of the run; None if it has all that it should have."""
        return self._shipping.failure if self._shipping is not None else None

    @property
    def needs_snapshot(self) -> bool:
        """Whether only a snapshot can make the copy complete again (`Shipping`)."""
        return self._shipping is not None and self._shipping.needs_snapshot

    def append(self, record: Record) -> None:
        """Copy a record, in order."""
        if self._shipping is not None:
            self._shipping.append(record)

    def begin_snapshot(self, first_index: int) -> None:
        """Keep the records from this index on, which a snapshot taken now does not have."""
        if self._shipping is not None:
            self._shipping.begin_snapshot(first_index)

    async def replace(self, snapshot: SuspendedManifest, first_index: int) -> None:
        """Copy a snapshot, which replaces the journal so far (`Shipping.replace`).

        A failure delays no snapshot of the local disk.
        """
        if self._shipping is None:
            return
        began = time.monotonic()
        try:
            await self._snapshots.copy(snapshot, first_index, self._shipping)
        except Exception as error:  # noqa: BLE001 - any failure leaves the run training
            self._schedule.copy_failed(began, time.monotonic())
            metrics.SNAPSHOT_FAILURES.inc()
            log.warning(
                "a snapshot could not be copied to the checkpoint store; it is tried again",
                model_id=self._name,
                reason=error_message(to_result(error)),
            )
        else:
            self._schedule.copied()

    async def begin_with(self, state: SuspendedManifest) -> None:
        """Copy a state that the local disk has, before any request runs."""
        if self._shipping is None:
            return
        self._shipping.begin_snapshot(0)
        try:
            await self._snapshots.copy(state, 0, self._shipping)
        except WireError as error:
            self._shipping.require_snapshot(error.message)

    def continuation(self, index: int, act: Callable[[], None]) -> Callable[[], None]:
        """Return what to call once a record is on the disk: `act`, or what waits for the store."""
        if self._shipping is None or not self._wait_for_store:
            return act
        return partial(self._shipping.when_shipped, index, act)

    async def shipped(self) -> None:
        """Return once the store has all records so far, if requests wait for that.

        Raises:
            Moved: another head has taken over the run.
        """
        if self._shipping is not None and self._wait_for_store:
            with self._reporting_moves():
                await self._shipping.shipped()

    async def check_owned(self) -> None:
        """See `RequestLog.check_owned`."""
        if self._shipping is not None:
            with self._reporting_moves():
                await self._shipping.check_owned()

    @contextmanager
    def _reporting_moves(self) -> Iterator[None]:
        try:
            yield
        except Fenced:
            raise Moved(self._name) from None

    def close(self) -> None:
        """Copy nothing more. Idempotent."""
        if self._shipping is not None:
            self._shipping.close()

    async def closed(self) -> None:
        """Copy nothing more, and return once nothing is being written."""
        if self._shipping is not None:
            await self._shipping.closed()
