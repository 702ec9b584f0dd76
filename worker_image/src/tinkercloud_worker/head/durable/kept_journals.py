"""What heads that have ended left of their runs: journals on the disk, and in the object store."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from tinkercloud_protocol.heads import journal_files
from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable
from tinkercloud_worker.checkpoints.store import CheckpointStore, StoreFailed
from tinkercloud_worker.head.durable.journal_copies import LocalState, SharedJournals, check_fits
from tinkercloud_worker.head.durable.journal_room import JournalRoom, num_bytes_in
from tinkercloud_worker.journal.folder import JournalFolder
from tinkercloud_worker.journal.records import HEADER_BYTES, Record
from tinkercloud_worker.journal.shared_log import LogPlace

log = structlog.get_logger(__name__)


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


@dataclass(frozen=True, slots=True)
class KeptJournals:
    """Finds the journals that this head may continue."""

    root: Path | None
    """Folder of the journals on the disk; None if there are none."""
    snapshots: CheckpointStore
    """Where the snapshots on the disk are."""
    shared: SharedJournals | None
    """The copies in the object store, if this head makes any."""

    def count(self, room: JournalRoom) -> None:
        """Count what an earlier head has left of runs, until this head continues them.

        What no head can continue is deleted.
        """
        if self.root is None or room.max_bytes is None:
            return
        journal_files.delete_withdrawn(self.root)
        try:
            for manifest in self.on_disk():
                folder = journal_files.run_folder(self.root, manifest.run_id)
                room.share(manifest.run_id, manifest.spec.owner).found(num_bytes_in(folder), 0)
        except OSError as error:
            log.warning("the folder of journals can't be read", reason=str(error))

    def on_disk(self, only: str = "") -> list[JournalManifest]:
        """Return the manifests of all local journals that are not damaged, or of one run's. Blocks.

        Raises:
            OSError: the disk can't be read.
        """
        found = []
        if self.root is None:
            return []
        for run_id in journal_files.run_ids(self.root):
            try:
                if only in {"", run_id}:
                    found.append(journal_files.read_manifest(self.root, run_id))
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
        return self.shared is not None and await self.shared.is_replaced(manifest)

    async def find(self, run_id: str, spec: ModelSpec) -> Kept | None:
        """Return what is kept of a run that the head of `spec.resume_generation` had, or None.

        Raises:
            StateLost: it is the journal of another model.
            DamagedJournal: its journal is damaged, and there is no copy.
            InvalidRequest: its manifest or that of its snapshot is damaged, and there is no copy.
            Unavailable: the local disk can't be read, and there is no copy.
        """
        if self.root is None:
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
        if self.shared is None:
            return kept
        if kept is not None:
            local = LocalState(kept.snapshot, kept.records)
            if not await self.shared.is_ahead(kept.manifest, local):
                return kept
        folder = self.folder(run_id)
        try:
            place = await self.shared.fetch(run_id, spec, folder, self.snapshots)
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
        if self.shared is None:
            return None
        place = await self.shared.fetch(run_id, spec, self.folder(run_id), self.snapshots)
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
        folder = self.folder(run_id)
        manifest = await asyncio.to_thread(folder.manifest)
        if manifest is None or spec.resume_generation not in manifest.generations:
            return None
        check_fits(manifest, spec)
        records = await asyncio.to_thread(folder.read)
        snapshot = await self.snapshots.find_suspended(run_id)
        deaths = await asyncio.to_thread(folder.deaths)
        return Kept(manifest, snapshot, records, max(folder.numbers(), default=0), deaths, place)

    def folder(self, run_id: str) -> JournalFolder:
        """Return the folder of a run's journal on the disk, which need not exist."""
        assert self.root is not None  # noqa: S101 - only called if there is one
        return JournalFolder(self.root, run_id)
