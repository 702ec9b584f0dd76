"""The runs of a head that survive its end, and continuing those of an earlier head."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from tinkercloud_protocol.heads import journal_files
from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.durability_settings import DurabilityLevel
from tinkercloud_protocol.heads.journal_copy import Base
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable, WireError
from tinkercloud_worker import metrics
from tinkercloud_worker.checkpoints.store import CheckpointStore, StoreFailed
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.durable.durable_run import DurableRun, LocalJournal
from tinkercloud_worker.head.durable.journal_copies import LocalState, SharedJournals, check_fits
from tinkercloud_worker.head.durable.journal_room import JournalRoom, num_bytes_in
from tinkercloud_worker.head.durable.snapshots import Snapshots
from tinkercloud_worker.head.durable.suspension import Suspension
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.order.attempts import Attempts, RepeatTurns
from tinkercloud_worker.journal.folder import JournalFolder
from tinkercloud_worker.journal.records import HEADER_BYTES, Record
from tinkercloud_worker.journal.shared_log import LogPlace
from tinkercloud_worker.journal.shipping import Listeners

log = structlog.get_logger(__name__)

_THREADS = 8
"""Files that are written at the same time."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is on the disk of a run whose head has ended."""

    manifest: JournalManifest
    snapshot: SuspendedManifest | None
    records: Sequence[Record]
    last_segment: int
    deaths: Mapping[int, int]
    """See `Attempts.deaths`."""
    place: LogPlace | None = None
    """End of the copied journal, if it was read from there."""

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of the journal and of the snapshot."""
        files = self.snapshot.files if self.snapshot is not None else {}
        journal = sum(len(each.body) + HEADER_BYTES for each in self.records)
        return journal, sum(file.size_bytes for file in files.values())


class Durability:
    """The journals of one head. Belongs to one event loop."""

    def __init__(self, backend: Backend, suspension: Suspension) -> None:
        config = backend.config
        self._backend = backend
        self._suspension = suspension
        self._root = Path(config.journal_dir) if config.journal_dir is not None else None
        self._config = config.durability
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="journal")
        self._runs: dict[str, DurableRun] = {}
        self._turns = RepeatTurns()
        self._observers: list[Callable[[], None]] = []
        self.on_taken_over: Callable[[str], None] = lambda _: None
        """Called when another head has taken over a model."""
        metrics.JOURNALS_DEGRADED.set_function(lambda: len(self.degraded))
        self.store = self._suspension.backend.store
        """Where the snapshots are."""
        self._room: JournalRoom | None = None
        if self._root is not None:
            self._room = JournalRoom(self._root, self._config)
            self._root.mkdir(parents=True, exist_ok=True)
            self._count_kept(self._root, self._room)
            self.store = CheckpointStore(open_store(self._root.absolute().as_uri()))
        self._shared: SharedJournals | None = None
        if self.level == "remote":
            self._shared = SharedJournals(config.checkpoint_root, config.generation, self._config)

    def _count_kept(self, root: Path, room: JournalRoom) -> None:
        """Count what an earlier head has left of runs, until this head continues them.

        What no head can continue is deleted.
        """
        if room.max_bytes is None:
            return
        journal_files.delete_withdrawn(root)
        try:
            for manifest in self.on_disk():
                folder = journal_files.run_folder(root, manifest.run_id)
                room.share(manifest.run_id, manifest.spec.owner).found(num_bytes_in(folder), 0)
        except OSError as error:
            log.warning("the folder of journals can't be read", reason=str(error))

    def on_disk(self, only: str = "") -> list[JournalManifest]:
        """Return the manifests of all local journals that are not damaged, or of one run's. Blocks.

        Raises:
            OSError: the disk can't be read.
        """
        found = []
        if self._root is None:
            return []
        for run_id in journal_files.run_ids(self._root):
            try:
                if only in {"", run_id}:
                    found.append(journal_files.read_manifest(self._root, run_id))
            except InvalidRequest as error:
                log.error(  # noqa: TRY400 - nothing is wrong here
                    "the journal of a run on the disk is damaged", reason=error.message
                )
        return [manifest for manifest in found if manifest is not None]

    async def is_replaced(self, manifest: JournalManifest) -> bool:
        """Return whether another head is known to have continued a run from a copied journal.

        Args:
            manifest: of the local journal.

        Raises:
            StoreFailed: the store does not respond.
        """
        return self._shared is not None and await self._shared.is_replaced(manifest)

    def of(self, name: str) -> DurableRun | None:
        """Return the journal of a model; None if it has none."""
        return self._runs.get(name)

    @property
    def degraded(self) -> Mapping[str, str]:
        """Why runs that should survive the end of this process would not, by model."""
        return {name: run.degraded for name, run in self._runs.items() if run.degraded is not None}

    def states(self) -> dict[str, str | None]:
        """Return why each run with a journal is degraded, by model; None for one that isn't."""
        return {name: run.degraded for name, run in self._runs.items()}

    @contextmanager
    def observed_by(self, observe: Callable[[], None]) -> Iterator[None]:
        """Call a function whenever `states` may have changed, until the context ends."""
        self._observers.append(observe)
        try:
            yield
        finally:
            self._observers.remove(observe)

    def _changed(self) -> None:
        for observe in self._observers:
            observe()

    @property
    def level(self) -> DurabilityLevel:
        """What should survive the end of this process."""
        return self._config.level if self._root is not None else "none"

    def close(self) -> None:
        """Write nothing from now on."""
        for run in self._runs.values():
            run.close()

    async def forgive(self) -> None:
        """Count no death of this head from now on: it stops in an orderly way."""
        self._turns.is_stopping = True
        await asyncio.gather(*[run.attempts.forgive() for run in self._runs.values()])

    async def begin(self, model: LiveModel) -> None:
        """Start the journal of a new model, before its creation is queued."""
        await self._begin(model, Base(snapshot=None, first_index=0))

    async def _begin(
        self,
        model: LiveModel,
        base: Base | None,
        lineage: Sequence[str] = (),
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Start a journal.

        Args:
            model: the model.
            base: what the records of its copy follow; None if that is still to be copied.
            lineage: generations of the heads that had the model before.
            prepare: writes what the local records follow, before the journal exists.
        """
        if self.level == "none":
            return
        name, folder = str(model.model_id), self._folder(str(model.model_id))
        own = self._backend.config.generation
        manifest = JournalManifest(
            run_id=name,
            generations=[*(each for each in lineage if each != own), own],
            base_model=self._backend.config.model.name,
            base_fingerprint=self._backend.base_fingerprint,
            spec=model.spec,
            initial_seed=model.operations.initial_seed,
        )
        run = await self._attach(model, manifest, folder)
        try:
            await asyncio.to_thread(folder.delete)
            if prepare is not None:
                await prepare()
            await asyncio.to_thread(folder.write_manifest, manifest)
        except (OSError, WireError) as error:
            run.degrade(error)
        if self._shared is not None and self._runs.get(name) is run:
            shipping = await self._shared.start(manifest, base, self._listeners(model))
            if self._runs.get(name) is run:
                run.ship(shipping)
            else:
                await shipping.closed()
        if name not in self._runs:
            # The model was deleted meanwhile, possibly before some of this was written.
            await self.remove(name)

    async def begin_from(
        self, model: LiveModel, state: SuspendedManifest, store: CheckpointStore
    ) -> None:
        """Start the journal of a model that resumes from a suspended state: copy it."""
        name = str(model.model_id)

        async def copy_state() -> None:
            share = self._runs[name].share
            size = sum(file.size_bytes for file in state.files.values())
            try:
                if state.lora is None:
                    await asyncio.to_thread(share.reserve, size)
                else:
                    share.stage(size)
                for file in state.files:
                    await self.store.put_suspended(state, file, await store.read_file(state, file))
                await self.store.commit_suspended(state)
            except Exception:
                await self.store.discard_suspended(state)
                share.discarded()
                raise
            share.committed()

        await self._begin(model, None, state.lineage, copy_state)
        run = self.of(name)
        if run is not None and run.failure is None:
            await run.copy_snapshot(state)

    async def find(self, run_id: str, spec: ModelSpec) -> Kept | None:
        """Return what is kept of a run that the head of `spec.resume_generation` had, or None.

        Raises:
            StateLost: it is the journal of another model.
            DamagedJournal: its journal is damaged, and there is no copy.
            InvalidRequest: its manifest or that of its snapshot is damaged, and there is no copy.
            Unavailable: the local disk can't be read, and there is no copy.
        """
        if self._root is None:
            return None
        try:
            kept = await self._read(run_id, spec, None)
        except (InvalidRequest, OSError) as error:
            reason = error.message if isinstance(error, InvalidRequest) else str(error)
            if (copy := await self.find_copy(run_id, spec, reason)) is not None:
                return copy
            if isinstance(error, InvalidRequest):
                raise
            raise Unavailable(
                f"training run {run_id} can't be continued: its journal can't be read ({error});"
                " repair the disk, then send the request again"
            ) from None
        if self._shared is None:
            return kept
        if kept is not None:
            local = LocalState(kept.snapshot, kept.records)
            if not await self._shared.is_ahead(kept.manifest, local):
                return kept
        folder = self._folder(run_id)
        try:
            place = await self._shared.fetch(run_id, spec, folder, self.store)
        except StoreFailed:
            if kept is None or not await asyncio.to_thread(folder.exists):
                raise
            # The store can be read, but not written.
            return kept
        return await self._read(run_id, spec, place) if place is not None else kept

    async def find_copy(self, run_id: str, spec: ModelSpec, reason: str) -> Kept | None:
        """Replace what the disk has of a run by the copy in the object store, if there is one.

        Args:
            run_id: the run.
            spec: as for `find`.
            reason: why the disk is of no use, for the log.

        Raises:
            WireError: the copy is not that of this model, is damaged, or can't be read or written.
        """
        if self._shared is None:
            return None
        place = await self._shared.fetch(run_id, spec, self._folder(run_id), self.store)
        if place is None:
            return None
        log.warning(
            "a run continues from the checkpoint store, since its disk can't be read",
            model_id=run_id,
            reason=reason,
        )
        return await self._read(run_id, spec, place)

    async def _read(self, run_id: str, spec: ModelSpec, place: LogPlace | None) -> Kept | None:
        """Return the local journal of a run that the specification continues, or None."""
        folder = self._folder(run_id)
        manifest = await asyncio.to_thread(folder.manifest)
        if manifest is None or spec.resume_generation not in manifest.generations:
            return None
        check_fits(manifest, spec)
        records = await asyncio.to_thread(folder.read)
        snapshot = await self.store.find_suspended(run_id)
        deaths = await asyncio.to_thread(folder.deaths)
        return Kept(manifest, snapshot, records, max(folder.numbers(), default=0), deaths, place)

    async def take_over(self, model: LiveModel, kept: Kept) -> None:
        """Continue a kept journal in this head, before the model's requests run.

        Raises:
            Unavailable: the journal can't be written here.
        """
        own = self._backend.config.generation
        generations = [each for each in kept.manifest.generations if each != own]
        if self._shared is not None and kept.place is None:
            generations = await self._shared.generations(kept.manifest.run_id, generations)
        manifest = kept.manifest.model_copy(update={"generations": [*generations, own]})
        folder = self._folder(str(model.model_id))
        await self.store.keep_suspended(kept.manifest.run_id, kept.snapshot)
        try:
            await asyncio.to_thread(folder.write_manifest, manifest)
            if self._config.fsync:
                # The last head may have been killed before it had done so.
                await asyncio.to_thread(folder.synchronize)
        except OSError as error:
            raise Unavailable(
                f"training run {model.model_id} can't be continued: its journal can't be written"
                f" ({error}); free or repair the disk, then send the request again"
            ) from None
        run = await self._attach(model, manifest, folder)
        run.share.found(*kept.num_bytes)
        run.attempts.deaths.update(kept.deaths)
        local, listeners = LocalState(kept.snapshot, kept.records), self._listeners(model)
        next_index = local.next_index
        if self._shared is not None and kept.place is not None:
            next_index = kept.place.next_index
            run.ship(self._shared.resume(manifest, kept.place, listeners))
        elif self._shared is not None:
            shipping, next_index = await self._shared.catch_up(manifest, local, listeners)
            run.ship(shipping)
        run.continue_after(kept.last_segment, next_index - 1)

    async def leave(self, run_id: str) -> None:
        """Write nothing more of a model; its journal stays. Idempotent."""
        if (run := self._runs.pop(run_id, None)) is not None:
            self._changed()
            run.share.left()
            await run.closed()

    async def remove(self, run_id: str) -> None:
        """Delete the journal of a model that was deleted, or is stored elsewhere. Idempotent."""
        await self.drop(run_id)
        if self._shared is not None:
            await self._shared.remove(run_id)

    async def drop(self, run_id: str) -> None:
        """Delete the local journal of a model that another head continues. Idempotent."""
        if (run := self._runs.get(run_id)) is not None:
            run.share.abandon()
        await self.leave(run_id)
        if self._room is not None:
            folder = self._folder(run_id)
            try:
                await asyncio.to_thread(folder.delete)
            except OSError as error:
                log.warning("failed to delete a journal", model_id=run_id, reason=str(error))
            else:
                self._room.remove(run_id)

    async def _attach(
        self, model: LiveModel, manifest: JournalManifest, folder: JournalFolder
    ) -> DurableRun:
        copies = self._shared.snapshots if self._shared is not None else None
        assert self._room is not None  # noqa: S101 - there is one if there are journals
        name = str(model.model_id)
        share = self._room.share(name, model.spec.owner)
        snapshots = Snapshots(self._suspension, model, self.store, share, copies)
        earlier = self._runs.pop(name, None)
        run = DurableRun(
            model,
            LocalJournal(folder, manifest, self._threads, fsync=self._config.fsync),
            snapshots,
            config=self._config,
            attempts=Attempts(folder, self._threads, self._turns),
            on_change=self._changed,
        )
        # First of all, so that a deletion of the model finds it.
        self._runs[name] = run
        self._changed()
        model.queue.log = run
        if earlier is not None:
            await earlier.closed()
        return run

    def _listeners(self, model: LiveModel) -> Listeners:
        name = str(model.model_id)

        def on_change() -> None:
            model.queue.wake()
            self._changed()

        return Listeners(on_change, lambda: self.on_taken_over(name))

    def _folder(self, run_id: str) -> JournalFolder:
        assert self._root is not None  # noqa: S101 - only called if there is one
        return JournalFolder(self._root, run_id)
