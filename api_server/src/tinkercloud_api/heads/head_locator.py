"""Finds the session head of a run or sampling session, and places runs and samplers on heads.

A model is created on a head once, and the catalog records the head's generation. If the head of
that generation is gone, the checkpoint store shows whether it suspended the run. If it did, another
head resumes the run under its own generation. If not, the model is lost and all further requests
for it fail: an empty or older model under the same id would silently lose training. Sampling
sessions of base models and saved checkpoints have no state to lose and are registered with any head
that serves them; all others are restored with their run.

Every step can be repeated, so if a process dies between two steps, the next request completes the
work. The catalog is written last, and only if it still names the expected generation: if two
servers resume the same run, neither can undo what was trained through the other.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Set

import aiohttp
import structlog

from tinkercloud_api.catalog.schema.tables import TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.heads.deleted_runs import DeletedRuns
from tinkercloud_api.heads.head_calls import HEAD_CALL_SECONDS, HeadCalls
from tinkercloud_api.heads.known_runs import KnownRun, KnownRuns
from tinkercloud_api.heads.lost_runs import lost_message, remains, why_deleted
from tinkercloud_api.heads.run_admission import RunAdmission
from tinkercloud_api.providers.base import HeadEndpoint, Pending, SessionProvider
from tinkercloud_protocol.heads.journal_files import has_journal
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest, StateLost, Unavailable
from tinkercloud_protocol.wire.future_responses import QueueState

log = structlog.get_logger(__name__)

_RESUME_SECONDS = 600.0
"""A head responds only after it has read the whole suspended run."""


class SamplerLost(InvalidRequest):
    """A sampling session's weights existed only in a head that is gone.

    The status is 400 rather than 410, on which the SDK would repeat the sampling request forever.
    """


class HeadLocator:
    """Locates heads, and places runs and samplers on them. Belongs to one event loop."""

    def __init__(
        self,
        catalog: Catalog,
        checkpoints: Checkpoints,
        provider: SessionProvider,
        client: aiohttp.ClientSession,
        admission: RunAdmission | None = None,
    ) -> None:
        self._catalog = catalog
        self._checkpoints = checkpoints
        self._provider = provider
        self.calls = HeadCalls(provider, client)
        """Calls to the heads that are found."""
        self._admission = admission
        self.known = KnownRuns(catalog)
        self.deleted = DeletedRuns(
            self.known, catalog, checkpoints, provider, self.calls, admission
        )
        self._registered: set[tuple[str, str]] = set()
        """Generations of heads, with the sampling sessions that were registered with them."""
        self._refusals: dict[str, str] = {}
        """By run: the generation of the head that refused it last, until a head serves it."""
        self._placing: dict[str, asyncio.Task[HeadEndpoint]] = {}

    async def head_of_run(self, run_id: str) -> HeadEndpoint:
        """Return the head that holds a run, whose caller was authorized.

        Raises:
            StateLost: the run was deleted, or its head is gone without having suspended it.
        """
        run = await self.known.run(run_id)
        if run is None or run.is_deleted:
            raise StateLost(await why_deleted(self._catalog, self._checkpoints, run_id))
        if (endpoint := self.head_at_once(run_id)) is not None:
            return endpoint
        return await asyncio.shield(self._placement_task(run_id))

    def head_at_once(self, run_id: str) -> HeadEndpoint | None:
        """Return the head that holds a run; None if `head_of_run` must wait for it, or fails."""
        run = self.known.runs.get(run_id)
        if run is None or run.is_deleted:
            return None
        endpoint = self._provider.find(run.placement)
        return endpoint if endpoint and endpoint.generation == run.generation else None

    @property
    def placing(self) -> Set[str]:
        """Runs of which requests wait until they are on a head."""
        return self._placing.keys()

    def start_placing(self, row: TrainingRun) -> None:
        """Start placing a run without a head in the background; `head_of_run` waits for it."""
        self.known.cache_run(row)
        if row.generation is None:
            _in_background = self._placement_task(row.id)

    def _placement_task(self, run_id: str) -> "asyncio.Task[HeadEndpoint]":
        """Return the task that places a run on a head, which all callers share."""
        task = self._placing.get(run_id)
        if task is None:
            task = self._placing[run_id] = asyncio.create_task(self._place_run(run_id))
            task.add_done_callback(lambda _: self._placing.pop(run_id, None))
            task.add_done_callback(_retrieve_exception)
        return task

    async def _place_run(self, run_id: str) -> HeadEndpoint:
        """Create a run on a head, or resume it on another head."""
        if self._admission is not None:
            await self._admission.wait(run_id)
        # The cached row may be stale: another server may have placed the run in the meantime.
        row = await self._catalog.run(run_id)
        if row is None or row.deleted_at is not None:
            raise StateLost(await why_deleted(self._catalog, self._checkpoints, run_id))
        run, lost = self.known.cache_run(row), row.generation
        if lost is not None and await self._provider.is_gone(run.placement):
            raise StateLost(await lost_message(self._checkpoints, run_id))
        if lost is not None and self._provider.has_ended(run.placement, lost):
            # Report a lost run without waiting for another head, which may take long to start.
            async with self._naming_what_remains(run_id):
                await self._require_suspended(run_id, run, lost)
        endpoint = await self._provider.acquire(run.placement)
        if endpoint.generation == lost:
            await self._take_back(endpoint, run_id, run)
            return endpoint
        if lost is None:
            await self._create_on(endpoint, run_id, run, lost)
        else:
            async with self._naming_what_remains(run_id):
                await self._create_on(endpoint, run_id, run, lost)
        if not await self._catalog.set_generation(run_id, endpoint.generation, after=lost):
            if await self._catalog.deleted_runs([run_id]):
                # The run may have been deleted before it was created on the head.
                run.is_deleted = True
                await self.deleted.release_run(run_id, run, set())
                raise StateLost(await why_deleted(self._catalog, self._checkpoints, run_id))
            raise Unavailable(
                f"training run {run_id} was placed on another session head at the same time; send"
                " the request again"
            )
        run.generation = endpoint.generation
        self._refusals.pop(run_id, None)
        if lost is not None:
            log.info("training run resumed", run_id=run_id, generation=endpoint.generation)
        return endpoint

    @contextlib.asynccontextmanager
    async def _naming_what_remains(self, run_id: str) -> AsyncIterator[None]:
        """Add the checkpoint to resume from to errors of a run that can't be resumed.

        Its saved state may be damaged, or that of another model.
        """
        try:
            yield
        except (StateLost, InvalidRequest) as error:
            if "create_training_client_from_state" in error.message:
                raise
            what_remains = await remains(self._checkpoints, run_id)
            raise type(error)(f"{error.message}; {what_remains}") from error

    async def _create_on(
        self, endpoint: HeadEndpoint, run_id: str, run: KnownRun, lost: str | None
    ) -> None:
        """Create a run on a head, or resume it from the head that it was lost with."""
        knows_more = self._provider.may_have_journals(run.placement)
        if lost is not None and not knows_more:
            await self._require_resumable(run_id, run, lost)
        spec = run.spec.model_copy(update={"resume_generation": lost})
        body, path = spec.model_dump_json(exclude_defaults=True), f"{routes.HEAD_MODELS}/{run_id}"
        try:
            await self.calls.put(endpoint, path, body, _RESUME_SECONDS)
        except StateLost:
            if lost is not None and knows_more:
                # Its error names the checkpoint to resume from.
                await self._require_resumable(run_id, run, lost)
            raise

    async def _require_resumable(self, run_id: str, run: KnownRun, lost: str) -> None:
        try:
            await self._require_suspended(run_id, run, lost)
        except StateLost:
            # The head found here may be an earlier one, from which the run was moved.
            await self._provider.confirm(run.placement)
            raise

    async def _require_suspended(self, run_id: str, run: KnownRun, generation: str) -> None:
        """Check that a head suspended a run before it ended, or left its journal.

        Raises:
            StateLost: it did neither; the message names the checkpoint to resume from.
        """
        unsaved = self._provider.unsaved(run.placement)
        if not (
            await self._checkpoints.suspended.has(run_id, generation, unsaved)
            or await asyncio.to_thread(
                has_journal, self._provider.journals(run.placement), run_id, generation
            )
            or await self._checkpoints.journals.has(run_id, generation)
        ):
            raise StateLost(await lost_message(self._checkpoints, run_id))

    async def report_lost(self) -> None:
        """Log the runs that were not saved by the heads that have ended since the last call."""
        for generation in self._provider.newly_ended():
            for row in await self._catalog.runs_of_generation(generation):
                run = self.known.cache_run(row)
                try:
                    await self._require_suspended(row.id, run, generation)
                except StateLost as error:
                    log.error("training run lost", run_id=row.id, reason=error.message)  # noqa: TRY400 - nothing is wrong here
                except Unavailable as error:
                    unsaved = self._provider.unsaved(run.placement)
                    log.warning(
                        "cannot determine yet whether a training run was saved",
                        run_id=row.id,
                        reason=error.message,
                        folder_of_unsaved_runs=str(unsaved),
                    )

    async def head_of_sampler(self, sampler_id: str) -> HeadEndpoint:
        """Return a head for a sampling session, whose caller was authorized.

        Raises:
            SamplerLost: the session's weights existed only in a head that is gone.
        """
        sampler = await self.known.sampler(sampler_id)
        if sampler is None:
            raise SamplerLost(f"sampling session {sampler_id} was deleted")
        if sampler.run_id is not None:
            try:
                return await self.head_of_run(sampler.run_id)
            except StateLost as error:
                raise SamplerLost(
                    f"the weights of sampling session {sampler_id} were not saved under a name, and"
                    f" {error.message}"
                ) from None
        endpoint = await self._provider.acquire(sampler.placement)
        if (endpoint.generation, sampler_id) not in self._registered:
            path = f"{routes.HEAD_SAMPLERS}/{sampler_id}"
            body = sampler.spec.model_dump_json(exclude_defaults=True)
            await self.calls.put(endpoint, path, body, HEAD_CALL_SECONDS)
            self._registered.add((endpoint.generation, sampler_id))
        return endpoint

    async def head_of_sample(self, sampler_id: str) -> HeadEndpoint:
        """Return the head that may hold the result of a sampling request, or can compute it again.

        Raises:
            SamplerLost: no head can ever serve the session again.
        """
        sampler = await self.known.sampler(sampler_id)
        if sampler is None or sampler.run_id is not None:
            return await self.head_of_sampler(sampler_id)
        found = self._provider.find(sampler.placement)
        return found if found is not None else await self._provider.acquire(sampler.placement)

    async def head_of(self, target: str) -> HeadEndpoint:
        """Return the head of a run or sampling session, as for a request that was accepted."""
        sampler = await self.known.sampler(target)
        return await (self.head_of_run if sampler is None else self.head_of_sampler)(target)

    async def note_running(self, targets: Iterable[str]) -> None:
        """Record that runs and sampling sessions are in use, as requests of theirs still run."""
        for target in targets:
            known = self.known.runs.get(self._run_of(target)) or self.known.samplers.get(target)
            if known is not None:
                self._provider.find(known.placement)

    def note_refusal(self, target: str, endpoint: HeadEndpoint) -> None:
        """Record that a head refuses to serve a run or sampling session, as one that was moved."""
        run_id = self._run_of(target)
        if run_id in self.known.runs:
            self._refusals[run_id] = endpoint.generation

    def _run_of(self, target: str) -> str:
        sampler = self.known.samplers.get(target)
        return sampler.run_id or target if sampler is not None else target

    async def head_after(self, target: str, refused: HeadEndpoint) -> HeadEndpoint:
        """Return the head of a run or sampling session that another one has refused to serve."""
        endpoint = await self.head_of(target)
        run_id = self._run_of(target)
        known = self.known.runs.get(run_id) or self.known.samplers[target]
        is_back = run_id in self.known.runs and run_id not in self._refusals
        if endpoint == refused and not is_back:
            # What is known of the run is older than its move.
            await self._provider.changed(known.placement)
            endpoint = await self.head_of(target)
        return endpoint

    async def _take_back(self, endpoint: HeadEndpoint, run_id: str, run: KnownRun) -> None:
        """Let a head continue a run that it refuses, if the run was moved there again.

        The catalog names that head: no other one has resumed the run in between.
        """
        if self._refusals.get(run_id) != endpoint.generation:
            return
        try:
            await self._provider.confirm(run.placement)
            await self.calls.delete(endpoint, f"{routes.HEAD_MOVE_MODEL}/{run_id}", set())
        except Unavailable as error:
            log.info("a run is refused by its head", run_id=run_id, reason=error.message)
        else:
            self._refusals.pop(run_id, None)

    def run_pending(self, run_id: str) -> Pending:
        """Return why the head of a run is not ready yet."""
        waits = self._admission.why_waiting(run_id) if self._admission is not None else None
        if waits is not None:
            return Pending("paused_capacity", waits)
        return self._provider.pending(self.known.runs[run_id].placement)

    async def limit_of(self, run_id: str, owner: str) -> str | None:
        """Return which limit of its tenant a run would wait for; None if it may start."""
        if self._admission is None:
            return None
        return await self._admission.limit_of(run_id, owner)

    def sampler_pending(self, sampler_id: str) -> Pending:
        """Return why the head of a sampling session is not ready yet."""
        if (sampler := self.known.samplers.get(sampler_id)) is None:
            return Pending("active", f"sampling session {sampler_id} was deleted")
        return self._provider.pending(sampler.placement)

    def pending_counts(self) -> "Counter[QueueState]":
        """Return the number of runs that are waiting for a head, by the SDK's queue state."""
        return Counter(
            self.run_pending(run_id).queue_state
            for run_id in self._placing.keys() & self.known.runs
        )


def _retrieve_exception(task: "asyncio.Task[HeadEndpoint]") -> None:
    """Retrieve a failed task's exception, so that asyncio does not log it if nobody waits."""
    if not task.cancelled():
        task.exception()
