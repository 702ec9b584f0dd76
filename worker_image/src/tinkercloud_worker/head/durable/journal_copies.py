"""The copies of a head's journals in the object store, which heads on other machines continue."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from obstore.store import ObjectStore

from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.journal_copy import FOLDER, Base, Header
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire.errors import InvalidRequest, StateLost, Unavailable, WireError
from tinkercloud_worker.checkpoints.store import CheckpointStore, StoreFailed
from tinkercloud_worker.journal.folder import JournalFolder
from tinkercloud_worker.journal.records import Record
from tinkercloud_worker.journal.shared_log import Ends, Fenced, LogPlace, SharedLog
from tinkercloud_worker.journal.shipping import Listeners, Shipping
from tinkercloud_worker.journal.waiting_records import WaitingRoom

log = structlog.get_logger(__name__)

Begin = Callable[[], Awaitable[LogPlace]]


@dataclass(frozen=True, slots=True)
class LocalState:
    """What the local journal of a run has."""

    snapshot: SuspendedManifest | None
    records: Sequence[Record]

    @property
    def next_index(self) -> int:
        """Index of the record after the last one; 0 if there is none."""
        return self.records[-1].index + 1 if self.records else 0

    def starts_like(self, shared: Ends) -> bool:
        """Return whether the records follow the same snapshot."""
        prefixes = [s.data_prefix if s else None for s in (self.snapshot, shared.base.snapshot)]
        return prefixes[0] == prefixes[1]

    def follows(self, shared: Ends, next_index: int) -> bool:
        """Return whether the copy has nothing else, and lacks nothing but records here."""
        first = self.records[0].index if self.records else next_index
        own_end = self.next_index if self.records else shared.base.first_index
        return self.starts_like(shared) and first <= next_index <= own_end


class SharedJournals:
    """All copies of one head's journals."""

    def __init__(self, checkpoint_root: str, generation: str, config: DurabilityConfig) -> None:
        self._store: ObjectStore = open_store(f"{checkpoint_root.rstrip('/')}/{FOLDER}")
        self._generation = generation
        self._config = config
        self._room = WaitingRoom(config.max_waiting_bytes)
        self.snapshots = CheckpointStore(self._store)
        """Where the files of the snapshots are copied to."""

    async def start(
        self, manifest: JournalManifest, base: Base | None, listeners: Listeners
    ) -> Shipping:
        """Start the copy of a new journal.

        Args:
            manifest: of the journal.
            base: what its records follow; None if that is still to be copied.
            listeners: what to call.
        """
        shared = self._log(manifest.run_id)

        async def begin() -> LogPlace:
            # What another head left when it had suspended the run, or what a name collides with.
            await shared.delete()
            return await shared.take_over(manifest, base)

        shipping = self._ship(shared, manifest, begin, listeners, await _unless_away(begin))
        if base is None:
            shipping.require_snapshot("the checkpoint store does not have the state of the run yet")
        return shipping

    def resume(self, manifest: JournalManifest, place: LogPlace, listeners: Listeners) -> Shipping:
        """Continue a journal that `fetch` has taken over."""
        shared = self._log(manifest.run_id)
        begin = partial(shared.take_over, manifest, None)
        return self._ship(shared, manifest, begin, listeners, place)

    async def is_ahead(self, manifest: JournalManifest, local: LocalState) -> bool:
        """Return whether the last head wrote requests to the copy that the local journal lacks.

        They were not confirmed, but the copy can only continue from where it ends.

        Args:
            manifest: of the local journal.
            local: its content.
        """
        shared = self._log(manifest.run_id)
        try:
            last = await shared.last()
            if last is None or last[1].manifest.generations[-1] != manifest.generations[-1]:
                return False
            if last[1].is_behind:
                # Its records are older than the local ones, even if their indexes are higher.
                return False
            if local.records:
                return last[1].next_index > local.next_index
            ends = await shared.check()
        except WireError:
            return False
        if ends is None or not local.starts_like(ends):
            return False
        return ends.header.next_index > ends.base.first_index

    async def is_replaced(self, manifest: JournalManifest) -> bool:
        """Return whether a head that a local journal does not name has taken over its copy.

        Raises:
            StoreFailed: the store does not respond.
        """
        try:
            last = await self._log(manifest.run_id).last()
        except InvalidRequest:
            # It is damaged, and names nobody.
            return False
        return last is not None and last[1].manifest.generations[-1] not in manifest.generations

    async def catch_up(
        self, manifest: JournalManifest, local: LocalState, listeners: Listeners
    ) -> tuple[Shipping, int]:
        """Continue the copy of a local journal; return it and the index of the next record.

        Raises:
            Unavailable: another head has taken over the run.
        """
        shared, ends = self._log(manifest.run_id), None
        try:
            ends = await shared.check()
        except WireError as error:
            log.warning(
                "a copied journal can't be read", run_id=manifest.run_id, reason=error.message
            )

        def is_behind(last: Header | None) -> bool:
            # A head that could not write to the store may have used indexes of the copy again. The
            # copy is then that of an earlier head, or is marked.
            if last is None or ends is None or last != ends.header or last.is_behind:
                return True
            is_same = last.manifest.generations[-1:] == manifest.generations[-2:-1]
            return not is_same or not local.follows(ends, last.next_index)

        try:
            place = await _unless_away(partial(shared.take_over, manifest, None, is_behind))
        except Fenced:
            raise _taken(manifest.run_id) from None
        # Records are numbered from here on before a later attempt succeeds.
        late = partial(shared.take_over, manifest, None, lambda _: True)
        shipping = self._ship(shared, manifest, late, listeners, place)
        next_index = local.next_index
        if not local.records and place is not None:
            next_index = place.next_index
        if place is None or place.is_behind:
            shipping.require_snapshot("the checkpoint store lacks requests of the run's last head")
        else:
            for record in local.records:
                if record.index >= place.next_index:
                    shipping.append(record)
        return shipping, next_index

    async def generations(self, run_id: str, known: list[str]) -> list[str]:
        """Return these generations, after those of the journal's copy that are not among them.

        A head may have taken over the copy without the catalog having recorded it. If the store
        does not respond, only the known ones are returned.
        """
        try:
            last = await self._log(run_id).last()
        except WireError:
            return known
        copied = last[1].manifest.generations if last is not None else []
        return [*[each for each in copied if each not in known], *known] if copied else known

    async def fetch(
        self, run_id: str, spec: ModelSpec, folder: JournalFolder, target: CheckpointStore
    ) -> LogPlace | None:
        """Take over the copy of a journal, and write it to the local disk; None if there is none.

        Args:
            run_id: the run.
            spec: the expected specification, which names the head that had it last.
            folder: the run's local folder; a journal that it has is deleted.
            target: where local snapshots are.

        Raises:
            StateLost: it is the journal of another model.
            DamagedJournal: the copy is damaged.
            Unavailable: the store, or the local disk, fails.
        """
        shared = self._log(run_id)
        last = await shared.last()
        if last is None or not last[1].continues(spec.resume_generation or ""):
            return None
        check_fits(last[1].manifest, spec)
        generations = [g for g in last[1].manifest.generations if g != self._generation]
        manifest = last[1].manifest.model_copy(
            update={"generations": [*generations, self._generation]}
        )
        try:
            place = await shared.take_over(manifest, None)
        except Fenced:
            raise _taken(run_id) from None
        state = await shared.read()
        if state is None:
            return None
        try:
            await asyncio.to_thread(folder.delete)
            if (snapshot := state.base.snapshot) is not None:
                for name in snapshot.files:
                    content = await self.snapshots.read_file(snapshot, name)
                    await target.put_suspended(snapshot, name, content)
                await target.commit_suspended(snapshot)
            await asyncio.to_thread(folder.restore, manifest, state.records)
        except OSError as error:
            raise Unavailable(
                f"training run {run_id} can't be continued: its journal can't be written ({error});"
                " free or repair the disk, then send the request again"
            ) from None
        return place

    async def remove(self, run_id: str) -> None:
        """Delete the copy of a journal, unless another head has taken it over. Idempotent."""
        try:
            await self._log(run_id).delete(self._generation)
        except WireError as error:
            log.warning("failed to delete a copied journal", run_id=run_id, reason=error.message)

    def _log(self, run_id: str) -> SharedLog:
        return SharedLog(self._store, run_id, self._config.store_timeout_seconds)

    def _ship(
        self,
        shared: SharedLog,
        manifest: JournalManifest,
        begin: Begin,
        listeners: Listeners,
        place: LogPlace | None,
    ) -> Shipping:
        return Shipping(
            shared,
            manifest,
            self._config,
            room=self._room,
            begin=begin,
            listeners=listeners,
            place=place,
        )


async def _unless_away(begin: Begin) -> LogPlace | None:
    """Return the result; None if the store does not respond."""
    try:
        return await begin()
    except StoreFailed as error:
        log.warning("a journal can't be copied yet", reason=error.message)
        return None


def check_fits(manifest: JournalManifest, spec: ModelSpec) -> None:
    """Check that a journal is that of a model, and of its owner.

    Raises:
        StateLost: it is not.
    """
    if (manifest.spec.owner, manifest.spec.lora) != (spec.owner, spec.lora):
        raise StateLost(
            f"the journal of training run {manifest.run_id} belongs to a model with another"
            " configuration"
        )


def _taken(run_id: str) -> Unavailable:
    return Unavailable(f"another session head continues training run {run_id}; send it again")
