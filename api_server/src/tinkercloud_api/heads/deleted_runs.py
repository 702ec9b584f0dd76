"""Frees what deleted runs and sampling sessions occupy, on heads and in the checkpoint store.

Every step can be repeated, so if a process dies between two steps, the next round of housekeeping
completes the work.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog

from tinkercloud_api.catalog.schema.tables import SamplingSession, TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.heads.head_calls import HeadCalls
from tinkercloud_api.heads.known_runs import KnownRun, KnownRuns
from tinkercloud_api.heads.run_admission import RunAdmission
from tinkercloud_api.providers.base import HeadEndpoint, Placement, SessionProvider
from tinkercloud_protocol.heads.journal_files import run_folder
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId

log = structlog.get_logger(__name__)

_CONCURRENT_CALLS = 16
"""Limit of concurrent calls to heads for the sampling sessions of one session."""
_HEAD_STOP_LIMIT = timedelta(hours=1)
"""Time after a run's deletion by which its head has certainly stopped."""


@dataclass(frozen=True, slots=True)
class DeletedRuns:
    """Releases deleted runs and sampling sessions. Belongs to one event loop."""

    known: KnownRuns
    catalog: Catalog
    checkpoints: Checkpoints
    provider: SessionProvider
    calls: HeadCalls
    admission: RunAdmission | None = None
    """Runs that wait for a limit, which the end of others may let start."""

    async def release(
        self, runs: Sequence[TrainingRun], samplers: Sequence[SamplingSession]
    ) -> None:
        """Free the resources of deleted runs and sampling sessions. This is idempotent.

        Args:
            runs: all runs of one or more SDK sessions.
            samplers: the sampling sessions of the same SDK sessions.

        Runs that cannot be released now are released later by `release_leftovers`. A head that does
        not respond keeps its sampling sessions for as long as it runs.
        """
        unresponsive: set[HeadEndpoint] = set()
        try:
            for row in runs:
                run = self.known.cache_run(row)
                await _attempt(row.id, self.release_run(row.id, run, unresponsive))
            await self._remove_samplers(samplers, unresponsive)
        finally:
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        if self.admission is not None:
            self.admission.wake()

    async def release_run(
        self, run_id: str, run: KnownRun, unresponsive: set[HeadEndpoint]
    ) -> None:
        """Free the resources of one deleted run. This is idempotent.

        Args:
            run_id: the run.
            run: what is known of it.
            unresponsive: heads that are not called again; one that does not respond is added.

        Raises:
            Unavailable: not all of them can be freed now.
        """
        await self.provider.release(run.placement)
        await self._delete_state(run_id, run, unresponsive)

    async def _delete_state(
        self, run_id: str, run: KnownRun, unresponsive: set[HeadEndpoint]
    ) -> None:
        """Delete a run from its head, if it has one, and its suspended state from the store."""
        if (endpoint := self.provider.find(run.placement)) is not None:
            await self.calls.delete(endpoint, f"{routes.HEAD_MODELS}/{run_id}", unresponsive)
        await self.checkpoints.suspended.delete(run_id, run.generation)
        await self.checkpoints.journals.delete(run_id)
        for target in (run_id, str(SamplingSessionId.of_current_weights(ModelId.parse(run_id)))):
            await self.checkpoints.deferred.remove_all(target)
        if (folder := self.provider.journals(run.placement)) is not None:
            await asyncio.to_thread(shutil.rmtree, run_folder(folder, run_id), ignore_errors=True)

    async def _remove_samplers(
        self, samplers: Sequence[SamplingSession], unresponsive: set[HeadEndpoint]
    ) -> None:
        """Remove sampling sessions from their heads, and their deferred requests.

        On a shared head, the sampling sessions of a run's unsaved weights outlive the run.
        """
        limit = asyncio.Semaphore(_CONCURRENT_CALLS)

        async def remove(row: SamplingSession) -> None:
            async with limit:
                placement = Placement(row.id, row.owner, row.base_model)
                if row.run_id is not None:
                    placement = self.known.runs[row.run_id].placement
                endpoint = self.provider.find(placement)
                if endpoint is not None and endpoint not in unresponsive:
                    path = f"{routes.HEAD_SAMPLERS}/{row.id}"
                    await _attempt(row.id, self.calls.delete(endpoint, path, unresponsive))
                await _attempt(row.id, self.checkpoints.deferred.remove_all(row.id))
                self.known.samplers.pop(row.id, None)

        await asyncio.gather(*[remove(row) for row in samplers])

    async def release_leftovers(self, moment: datetime) -> None:
        """Free resources of deleted runs that could not be freed when the runs were deleted.

        A stopping head suspends all runs that it holds, including a deleted run if the deletion did
        not reach it. The store is therefore cleaned once more when the head must have stopped. A
        failure does not affect the other runs and is retried the next time.
        """
        if await self.catalog.delete_runs_of_finished_sessions():
            self._wake_waiting()
        held = self.provider.runs()
        for run_id in await self.catalog.deleted_runs(held):
            if (run := await self.known.run(run_id)) is not None:
                run.is_deleted = True
                await _attempt(run_id, self.provider.release(run.placement))
        unresponsive: set[HeadEndpoint] = set()
        for run_id in await self.catalog.runs_to_sweep(moment - _HEAD_STOP_LIMIT):
            run = await self.known.run(run_id)
            if run is not None and run_id not in held:
                await _attempt(run_id, self._sweep(run_id, run, unresponsive))

    async def _sweep(self, run_id: str, run: KnownRun, unresponsive: set[HeadEndpoint]) -> None:
        await self._delete_state(run_id, run, unresponsive)
        # Those of a killed head are left: from now on they are checkpoints like others.
        await self.checkpoints.index.keep_autosaves(run_id)
        await self.catalog.mark_swept(run_id)


async def _attempt(name: str, release: Awaitable[None]) -> None:
    """Release one run or sampling session; log a failure, so that the others are still released."""
    try:
        await release
    except Unavailable as error:
        log.warning("cannot release resources yet; will retry", target=name, error=error.message)
