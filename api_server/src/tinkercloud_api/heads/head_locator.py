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
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from datetime import datetime, timedelta

import aiohttp
import structlog

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.claims import Claims
from tinkercloud_api.catalog.schema.tables import SamplingSession, TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_index import Checkpoints
from tinkercloud_api.heads.head_calls import HEAD_CALL_SECONDS, HeadCalls
from tinkercloud_api.heads.known_runs import KnownRun, KnownSampler
from tinkercloud_api.heads.lost_runs import lost_message, remains, why_deleted
from tinkercloud_api.heads.run_admission import RunAdmission
from tinkercloud_api.providers.base import HeadEndpoint, Pending, Placement, SessionProvider
from tinkercloud_api.providers.session_options import SessionOptions
from tinkercloud_protocol.heads.journal_files import has_journal, run_folder
from tinkercloud_protocol.heads.launch import ModelSpec, SamplerSpec
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest, StateLost, Unavailable
from tinkercloud_protocol.wire.future_responses import QueueState
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId, model_of_sampler

log = structlog.get_logger(__name__)

_RESUME_SECONDS = 600.0
"""A head responds only after it has read the whole suspended run."""
_CONCURRENT_CALLS = 16
"""Limit of concurrent calls to heads for the sampling sessions of one session."""
_HEAD_STOP_LIMIT = timedelta(hours=1)
"""Time after a run's deletion by which its head has certainly stopped."""


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
        self._admission = admission
        self._checkpoints = checkpoints
        self._claims = Claims(catalog)
        self._provider = provider
        self._calls = HeadCalls(provider, client)
        self._runs: dict[str, KnownRun] = {}
        self._samplers: dict[str, KnownSampler] = {}
        self._registered: set[tuple[str, str]] = set()
        """Generations of heads, with the sampling sessions that were registered with them."""
        self._refusals: dict[str, str] = {}
        """By run: the generation of the head that refused it last, until a head serves it."""
        self._placing: dict[str, asyncio.Task[HeadEndpoint]] = {}

    async def authorize_run(self, run_id: str, principal: Principal) -> bool:
        """Return whether a principal who may use a run as its request does may also change it.

        Raises:
            NotFound: the run does not exist for this principal.
            Forbidden: the principal may only read it.
        """
        run = await self._run(run_id)
        found = await self._claims.of(run.owner, run.session_id, principal) if run else None
        used = principal.require(found, f"training run {run_id!r}")
        principal.named_objects.add(run_id)
        return principal.may_change(used)

    async def authorize_sampler(self, sampler_id: str, principal: Principal) -> bool:
        """Check that a principal may use a sampling session as its request does.

        Returns:
            Whether the principal may also change it.

        Raises:
            NotFound: the session, or its checkpoint, does not exist for this principal.
            Forbidden: the principal may only read it.
        """
        known = await self._sampler(sampler_id)
        found = await self._claims.of(known.owner, known.session_id, principal) if known else None
        used = principal.require(found, f"sampling session {sampler_id!r}")
        if known is not None and known.spec.model_path is not None:
            await self._claims.check_source(known.spec.model_path, principal)
        return principal.may_change(used)

    async def _run(self, run_id: str) -> KnownRun | None:
        run = self._runs.get(run_id)
        if run is None and (row := await self._catalog.run(run_id)) is not None:
            run = self.cache_run(row)
        return run

    def cache_run(self, row: TrainingRun) -> KnownRun:
        """Cache a run's catalog row."""
        run = KnownRun(
            row.owner,
            row.session_id,
            placement_of(row),
            spec=ModelSpec.model_validate(row.spec),
            generation=row.generation,
            is_deleted=row.deleted_at is not None,
        )
        self._runs[row.id] = run
        return run

    async def add_sampler(self, row: SamplingSession) -> SamplingSession:
        """Record a sampling session; if it was recorded before, return the existing row.

        Raises:
            InvalidRequest: its sequence number was already used for other weights.
        """
        known = await self._catalog.add_sampler(row)
        if _weights(known) != _weights(row):
            index = SamplingSessionId.parse(row.id).index
            raise InvalidRequest(
                f"sampling_session_seq_id: {index} was already used in this session for other"
                " weights; use the next unused number"
            )
        self.cache_sampler(known)
        return known

    async def is_sampler(self, sampler_id: str) -> bool:
        """Whether a sampling session exists, of any owner."""
        return await self._sampler(sampler_id) is not None

    async def _sampler(self, sampler_id: str) -> KnownSampler | None:
        sampler = self._samplers.get(sampler_id)
        if sampler is None and (run_id := model_of_sampler(sampler_id)) is not None:
            # The session of a run's current weights exists as long as the run, without a row.
            if (run := await self._run(run_id)) is None:
                return None
            spec = SamplerSpec(owner=run.owner)
            sampler = KnownSampler(run.owner, run.session_id, run.placement, spec, run_id)
            self._samplers[sampler_id] = sampler
        if sampler is None and (row := await self._catalog.sampler(sampler_id)) is not None:
            sampler = self.cache_sampler(row)
        return sampler

    def cache_sampler(self, row: SamplingSession) -> KnownSampler:
        """Cache a sampling session's catalog row."""
        sampler = KnownSampler(
            row.owner,
            row.session_id,
            Placement(row.run_id or row.id, row.owner, row.base_model),
            SamplerSpec(owner=row.owner, model_path=row.model_path, saved_at=row.saved_at),
            row.run_id,
        )
        self._samplers[row.id] = sampler
        return sampler

    async def head_of_run(self, run_id: str) -> HeadEndpoint:
        """Return the head that holds a run, after `authorize_run` has accepted the caller.

        Raises:
            StateLost: the run was deleted, or its head is gone without having suspended it.
        """
        run = await self._run(run_id)
        if run is None or run.is_deleted:
            raise StateLost(await why_deleted(self._catalog, run_id))
        endpoint = self._provider.find(run.placement)
        if endpoint is None or endpoint.generation != run.generation:
            return await asyncio.shield(self._placement_task(run_id))
        return endpoint

    def start_placing(self, run_id: str) -> None:
        """Start placing a run on a head in the background; `head_of_run` waits for the result."""
        _in_background = self._placement_task(run_id)

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
            raise StateLost(await why_deleted(self._catalog, run_id))
        run, lost = self.cache_run(row), row.generation
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
                await self._release_run(run_id, run, set())
                raise StateLost(await why_deleted(self._catalog, run_id))
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
            await self._calls.put(endpoint, path, body, _RESUME_SECONDS)
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
            await self._checkpoints.is_suspended(run_id, generation, unsaved)
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
                run = self.cache_run(row)
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
        """Return a head for a sampling session, after `authorize_sampler` has accepted the caller.

        Raises:
            SamplerLost: the session's weights existed only in a head that is gone.
        """
        sampler = await self._sampler(sampler_id)
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
            await self._register(endpoint, sampler_id, sampler.spec)
            self._registered.add((endpoint.generation, sampler_id))
        return endpoint

    async def _register(self, endpoint: HeadEndpoint, sampler_id: str, spec: SamplerSpec) -> None:
        """Register a sampling session with a head."""
        path = f"{routes.HEAD_SAMPLERS}/{sampler_id}"
        body = spec.model_dump_json(exclude_defaults=True)
        await self._calls.put(endpoint, path, body, HEAD_CALL_SECONDS)

    async def head_of_sample(self, sampler_id: str) -> HeadEndpoint:
        """Return the head that may hold the result of a sampling request, or can compute it again.

        Raises:
            SamplerLost: no head can ever serve the session again.
        """
        sampler = await self._sampler(sampler_id)
        if sampler is None or sampler.run_id is not None:
            return await self.head_of_sampler(sampler_id)
        found = self._provider.find(sampler.placement)
        return found if found is not None else await self._provider.acquire(sampler.placement)

    async def head_of(self, target: str) -> HeadEndpoint:
        """Return the head of a run or sampling session, as for a request that was accepted."""
        sampler = await self._sampler(target)
        return await (self.head_of_run if sampler is None else self.head_of_sampler)(target)

    def note_refusal(self, target: str, endpoint: HeadEndpoint) -> None:
        """Record that a head refuses to serve a run or sampling session, as one that was moved."""
        run_id = self._run_of(target)
        if run_id in self._runs:
            self._refusals[run_id] = endpoint.generation

    def _run_of(self, target: str) -> str:
        sampler = self._samplers.get(target)
        return sampler.run_id or target if sampler is not None else target

    async def head_after(self, target: str, refused: HeadEndpoint) -> HeadEndpoint:
        """Return the head of a run or sampling session that another one has refused to serve."""
        endpoint = await self.head_of(target)
        run_id = self._run_of(target)
        known = self._runs.get(run_id) or self._samplers[target]
        is_back = run_id in self._runs and run_id not in self._refusals
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
            await self._calls.delete(endpoint, f"{routes.HEAD_MOVE_MODEL}/{run_id}", set())
        except Unavailable as error:
            log.info("a run is refused by its head", run_id=run_id, reason=error.message)
        else:
            self._refusals.pop(run_id, None)

    async def run_of_sampler(self, sampler_id: str) -> str | None:
        """Return the run whose unsaved weights a sampling session uses, or None if it uses none."""
        sampler = await self._sampler(sampler_id)
        return sampler.run_id if sampler is not None else None

    async def can_sample_again(self, sampler_id: str) -> bool:
        """Whether a sampling request whose result is gone can simply be executed again."""
        sampler = await self._sampler(sampler_id)
        return sampler is not None and sampler.run_id is None

    def run_pending(self, run_id: str) -> Pending:
        """Return why the head of a run is not ready yet."""
        waits = self._admission.why_waiting(run_id) if self._admission is not None else None
        if waits is not None:
            return Pending("paused_capacity", waits)
        return self._provider.pending(self._runs[run_id].placement)

    def sampler_pending(self, sampler_id: str) -> Pending:
        """Return why the head of a sampling session is not ready yet."""
        if (sampler := self._samplers.get(sampler_id)) is None:
            return Pending("active", f"sampling session {sampler_id} was deleted")
        return self._provider.pending(sampler.placement)

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
                await _attempt(row.id, self._release_run(row.id, self.cache_run(row), unresponsive))
            await self._remove_samplers(samplers, unresponsive)
        finally:
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        if self._admission is not None:
            self._admission.wake()

    async def _release_run(
        self, run_id: str, run: KnownRun, unresponsive: set[HeadEndpoint]
    ) -> None:
        await self._provider.release(run.placement)
        await self._delete_state(run_id, run, unresponsive)

    async def _delete_state(
        self, run_id: str, run: KnownRun, unresponsive: set[HeadEndpoint]
    ) -> None:
        """Delete a run from its head, if it has one, and its suspended state from the store."""
        if (endpoint := self._provider.find(run.placement)) is not None:
            await self._calls.delete(endpoint, f"{routes.HEAD_MODELS}/{run_id}", unresponsive)
        await self._checkpoints.delete_state(run_id, run.generation)
        await self._checkpoints.journals.delete(run_id)
        for target in (run_id, str(SamplingSessionId.of_current_weights(ModelId.parse(run_id)))):
            await self._checkpoints.deferred.remove_all(target)
        if (folder := self._provider.journals(run.placement)) is not None:
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
                    placement = self._runs[row.run_id].placement
                endpoint = self._provider.find(placement)
                if endpoint is not None and endpoint not in unresponsive:
                    path = f"{routes.HEAD_SAMPLERS}/{row.id}"
                    await _attempt(row.id, self._calls.delete(endpoint, path, unresponsive))
                await _attempt(row.id, self._checkpoints.deferred.remove_all(row.id))
                self._samplers.pop(row.id, None)

        await asyncio.gather(*[remove(row) for row in samplers])

    async def release_leftovers(self, moment: datetime) -> None:
        """Free resources of deleted runs that could not be freed when the runs were deleted.

        A stopping head suspends all runs that it holds, including a deleted run if the deletion did
        not reach it. The store is therefore cleaned once more when the head must have stopped. A
        failure does not affect the other runs and is retried the next time.
        """
        if await self._catalog.delete_runs_of_finished_sessions():
            self._wake_waiting()
        held = self._provider.runs()
        for run_id in await self._catalog.deleted_runs(held):
            if (run := await self._run(run_id)) is not None:
                run.is_deleted = True
                await _attempt(run_id, self._provider.release(run.placement))
        unresponsive: set[HeadEndpoint] = set()
        for run_id in await self._catalog.runs_to_sweep(moment - _HEAD_STOP_LIMIT):
            run = await self._run(run_id)
            if run is not None and run_id not in held:
                await _attempt(run_id, self._sweep(run_id, run, unresponsive))

    async def _sweep(self, run_id: str, run: KnownRun, unresponsive: set[HeadEndpoint]) -> None:
        await self._delete_state(run_id, run, unresponsive)
        # Those of a killed head are left: from now on they are checkpoints like others.
        await self._checkpoints.keep_autosaves(run_id)
        await self._catalog.mark_swept(run_id)

    def pending_counts(self) -> "Counter[QueueState]":
        """Return the number of runs that are waiting for a head, by the SDK's queue state."""
        return Counter(
            self.run_pending(run_id).queue_state for run_id in self._placing.keys() & self._runs
        )


def placement_of(row: TrainingRun) -> Placement:
    """Return the placement of a run, which any replica can derive from the catalog."""
    return Placement(
        row.id,
        row.owner,
        row.base_model,
        ModelSpec.model_validate(row.spec),
        SessionOptions.read(row.user_metadata or {}),
    )


def _weights(row: SamplingSession) -> tuple[str, str | None, str | None]:
    """Return the fields of a sampling session that identify its weights."""
    return row.base_model, row.model_path, row.run_id


async def _attempt(name: str, release: Awaitable[None]) -> None:
    """Release one run or sampling session; log a failure, so that the others are still released."""
    try:
        await release
    except Unavailable as error:
        log.warning("cannot release resources yet; will retry", target=name, error=error.message)


def _retrieve_exception(task: "asyncio.Task[HeadEndpoint]") -> None:
    """Retrieve a failed task's exception, so that asyncio does not log it if nobody waits."""
    if not task.cancelled():
        task.exception()
