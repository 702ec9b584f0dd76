"""Snapshots of a model that continues to train: its suspended state, taken between two requests.

`take` copies what changes, while no request of the model runs. `write` encodes and stores the copy
while the model trains on. A whole model is not copied, but written as it is, while passes run;
once its next step comes, the engine's thread waits for that.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tinkercloud_protocol.heads.checkpoint_manifest import (
    BODIES,
    HEAD_STATE,
    SuspendedManifest,
)
from tinkercloud_worker import metrics
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.checkpoints.store import CheckpointStore, StoreFailed
from tinkercloud_worker.checkpoints.suspended import Bodies, HeadState
from tinkercloud_worker.engine.trainer import Gradient, GradientLost, TrainingState
from tinkercloud_worker.head.durable.journal_room import RoomShare
from tinkercloud_worker.head.durable.state_writer import StateWriter
from tinkercloud_worker.head.durable.suspension import Suspension
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.sampling.samplers import Published
from tinkercloud_worker.journal.shipping import Shipping

_ENTRY_BYTES = 1000
"""More than a sampler takes in the head's state."""


class Abandoned(Exception):
    """An unfinished snapshot is of no use: its model was deleted, or is stored elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A copy of a model, without the weights of its samplers, which do not change."""

    writer: StateWriter
    state: Callable[[], formats.Files]
    """Waits for the copy of weights and moments, and returns its files. Of a whole model it writes
    these, and returns none."""
    gradient: Gradient | None
    head: HeadState
    bodies: Bodies
    published: list[Published]
    sessions: list[str]
    """Sampling sessions of weights that were never saved under a name; some may be evicted."""


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Takes and writes snapshots of one model."""

    suspension: Suspension
    model: LiveModel
    store: CheckpointStore
    share: RoomShare
    """What the run has on the disk."""
    copies: CheckpointStore | None = None
    """Where `copy` writes."""

    async def take(self) -> Snapshot:
        """Copy the model. No request of it may run meanwhile."""
        began = time.monotonic()
        operations, lost, gradient = self.model.operations, None, None
        if not self.model.queue.snapshot().has_dirty_gradient:
            try:
                gradient = await operations.engine.export_gradient()
            except GradientLost as error:
                lost = error.message
        writer = self.suspension.writer(self.model, self.store)
        writer.check_wanted = self._check_wanted
        state = await self._begin_state(writer, gradient)
        bodies = Bodies()
        # From here on without a pause, so that nothing arrives in between.
        head = self.suspension.head_state(self.model, [], bodies)
        samplers, model_id = self.suspension.samplers, self.model.model_id
        published, sessions = samplers.of_model(model_id), samplers.unnamed_of_model(model_id)
        head = head.model_copy(update={"gradient_lost": lost})
        metrics.SNAPSHOT_PAUSE_SECONDS.observe(time.monotonic() - began)
        return Snapshot(writer, state, gradient, head, bodies, published, sessions)

    def _check_wanted(self) -> None:
        """Check that the files are still of use. May be called on any thread."""
        if self.model.operations.refused is not None or self.share.is_abandoned:
            raise Abandoned

    async def _begin_state(
        self, writer: StateWriter, gradient: Gradient | None
    ) -> Callable[[], formats.Files]:
        """Return what `Snapshot.state` calls."""
        operations, backend = self.model.operations, self.suspension.backend
        if self.model.spec.lora is not None:
            writer.stage = self.share.stage
            take = await operations.engine.begin_export()
            return lambda: formats.encode_state(take(), backend.config.model.name)
        name, limit = str(self.model.model_id), backend.config.limits.max_sampler_bytes
        published = self.suspension.samplers.of_model(self.model.model_id)
        others = min(limit, sum(each.size_bytes for each in published))
        others += sum(tensor.nbytes for tensor in (gradient or {}).values())

        def write(state: TrainingState) -> formats.Files:
            self.share.reserve(state.size_bytes + others)
            formats.write_whole_state(state, writer.write)
            return {}

        return await operations.engine.run_lightweight(
            lambda: backend.trainer.begin_reading(name, write)
        )

    async def write(self, snapshot: Snapshot) -> SuspendedManifest:
        """Write a snapshot, which replaces the previous one; return its manifest.

        Raises:
            StoreFailed: it could not be written; the previous one remains.
            NoRoom: there is not enough room for it; the previous one remains.
            Abandoned: it is of no use any more.
        """
        writer = snapshot.writer
        try:
            await self._write_files(snapshot, writer)
            return await writer.commit()
        except Exception:
            if not await _may_be_committed(writer):
                # Each attempt would take the room that journals and later attempts need.
                await self.store.discard_suspended(writer.manifest)
            raise

    async def _write_files(self, snapshot: Snapshot, writer: StateWriter) -> None:
        suspension, config = self.suspension, self.suspension.backend.config
        # First of all, so that no step has to wait for the copy.
        await writer.put_state(snapshot.state)
        if snapshot.gradient is not None:
            await writer.put_gradient(snapshot.gradient)
        await writer.put(BODIES, await asyncio.to_thread(snapshot.bodies.encode))
        # What is left of the room is theirs: the model matters more.
        limit, left = config.limits.max_sampler_bytes, self.share.sampler_bytes()
        if left is not None and self.model.spec.lora is not None:
            entries = _ENTRY_BYTES * (len(snapshot.published) + len(snapshot.sessions))
            head_bytes = len(snapshot.head.model_dump_json()) + entries
            limit = min(limit, max(0, left - head_bytes))
        samplers = await suspension.write_samplers(
            snapshot.published, self.model.model_id, writer, limit
        )
        # Some may have been evicted while the snapshot was taken, or since.
        evicted = suspension.samplers.evicted.find(snapshot.sessions)
        head = snapshot.head.model_copy(update={"samplers": samplers, "evicted": evicted})
        await writer.put(HEAD_STATE, head.model_dump_json().encode())
        await writer.synchronize()

    async def copy(self, manifest: SuspendedManifest, first_index: int, shipping: Shipping) -> None:
        """Copy the snapshot that was written last to the shared journal.

        Args:
            manifest: the snapshot.
            first_index: index of the first record that it does not have.
            shipping: the shared journal.

        Raises:
            StoreFailed: it could not be copied.
        """
        assert self.copies is not None  # noqa: S101 - there is one if there is a shared journal
        await shipping.replace(manifest, first_index, self.store, self.copies)


async def _may_be_committed(writer: StateWriter) -> bool:
    """Return whether a state that could not be written to its end may exist all the same."""
    try:
        found = await writer.replaced()
    except StoreFailed:
        return True
    return found is not None and found.data_prefix == writer.manifest.data_prefix
