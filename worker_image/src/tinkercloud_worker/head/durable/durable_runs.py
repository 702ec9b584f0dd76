"""The runs of a head that survive its end, and continuing those of an earlier head."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import structlog

from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.durability_settings import DurabilityLevel
from tinkercloud_protocol.heads.journal_copy import Base
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire.errors import Unavailable, WireError
from tinkercloud_worker import metrics
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.durable.journal_copies import LocalState, SharedJournals
from tinkercloud_worker.head.durable.journal_room import JournalRoom
from tinkercloud_worker.head.durable.kept_journals import Kept, KeptJournals
from tinkercloud_worker.head.durable.run_journal import DurableRun, LocalJournal
from tinkercloud_worker.head.durable.snapshots import Snapshots
from tinkercloud_worker.head.durable.suspension import Suspension
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.order.attempts import Attempts, RepeatTurns
from tinkercloud_worker.journal.folder import JournalFolder
from tinkercloud_worker.journal.shipping import Listeners

log = structlog.get_logger(__name__)

_THREADS = 8
"""Files that are written at the same time."""


class Durability:
    """The journals of one head. Belongs to one event loop."""

    def __init__(self, backend: Backend, suspension: Suspension) -> None:
        config = backend.config
        self._backend = backend
        self._suspension = suspension
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
        root = Path(config.journal_dir) if config.journal_dir is not None else None
        if root is not None:
            self._room = JournalRoom(root, self._config)
            root.mkdir(parents=True, exist_ok=True)
            self.store = CheckpointStore(open_store(root.absolute().as_uri()))
        self._shared: SharedJournals | None = None
        if self.level == "remote":
            self._shared = SharedJournals(config.checkpoint_root, config.generation, self._config)
        self.kept = KeptJournals(root, self.store, self._shared)
        """What earlier heads have left."""
        if self._room is not None:
            self.kept.count(self._room)

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
        return self._config.level if self._room is not None else "none"

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
        name, folder = str(model.model_id), self.kept.folder(str(model.model_id))
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
            run.degrade(f"the journal can't be started ({error})")
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
            await run.copy.begin_with(state)

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
        folder = self.kept.folder(str(model.model_id))
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
            folder = self.kept.folder(run_id)
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
            LocalJournal(folder, manifest, self._threads, self._config.fsync, share),
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
