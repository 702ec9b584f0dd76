"""From a run or sampling session to the head that holds it: checked, created or given up.

A model is created on a head once; the catalog remembers the head's generation. If that generation
is gone, the store says whether it has suspended the run, for whatever reason it ended: then another
head goes on with it, under its own generation. If not, the model is lost, and requests for it are
refused for good, because an empty or an older model under the same id would silently forget its
training. Sampling sessions of base models and saved checkpoints have nothing to lose and are made
known to whatever head there is; the others come back with their run.

Each step may be repeated, so whoever dies between two of them is repaired by the next request. The
catalog is written last, and only if it still names the generation that was looked for: of two
servers that bring a run back, neither can undo what was trained through the other.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import aiohttp
import structlog

from tinkercloud_api.auth import Principal
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.tables import EXPIRED, SamplingSession, TrainingRun
from tinkercloud_api.checkpoints import Checkpoints, latest
from tinkercloud_api.providers.base import HeadEndpoint, Pending, Placement, SessionProvider
from tinkercloud_api.providers.session_options import SessionOptions
from tinkercloud_protocol import routes
from tinkercloud_protocol.errors import InvalidRequest, StateLost, Unavailable
from tinkercloud_protocol.futures import QueueState
from tinkercloud_protocol.ids import SamplingSessionId
from tinkercloud_protocol.launch import ModelSpec, SamplerSpec
from tinkercloud_protocol.paths import CheckpointKind

log = structlog.get_logger(__name__)

_HEAD_CALL_SECONDS = 30.0
_RESUME_SECONDS = 600.0
"""A head answers once it has read all of a suspended run."""
_CALLS_AT_ONCE = 16
"""To heads, about the sampling sessions of one session."""
_HEADS_HAVE_ENDED = timedelta(hours=1)
"""After a run's deletion: far longer than a head may take to stop."""


@dataclass(slots=True)
class _KnownRun:
    """What routing needs of a run; only its generation ever changes."""

    owner: str
    placement: Placement
    spec: ModelSpec
    generation: str | None
    is_deleted: bool


@dataclass(frozen=True, slots=True)
class _KnownSampler:
    owner: str
    placement: Placement
    spec: SamplerSpec
    run_id: str | None


class SamplerLost(InvalidRequest):
    """A sampling session's weights lived only in a head that is gone.

    A 400 rather than a 410, on which the SDK would send the same sample again without end.
    """


class HeadLocator:
    """Finds heads, and makes runs and samplers exist on them. Belongs to one event loop."""

    def __init__(
        self,
        catalog: Catalog,
        checkpoints: Checkpoints,
        provider: SessionProvider,
        client: aiohttp.ClientSession,
    ) -> None:
        self._catalog = catalog
        self._checkpoints = checkpoints
        self._provider = provider
        self._client = client
        self._runs: dict[str, _KnownRun] = {}
        self._samplers: dict[str, _KnownSampler] = {}
        self._registered: set[tuple[str, str]] = set()
        """Generation and sampling session of what a head has been told."""
        self._creating: dict[str, asyncio.Task[HeadEndpoint]] = {}

    async def authorize_run(self, run_id: str, principal: Principal) -> None:
        """Check that a run exists for this principal.

        Raises:
            NotFound: it does not.
        """
        run = await self._run(run_id)
        principal.require(run.owner if run else None, f"training run {run_id!r}")

    async def authorize_sampler(self, sampler_id: str, principal: Principal) -> None:
        """Check that a sampling session exists for this principal.

        Raises:
            NotFound: it does not.
        """
        sampler = await self._sampler(sampler_id)
        principal.require(sampler.owner if sampler else None, f"sampling session {sampler_id!r}")

    async def _run(self, run_id: str) -> _KnownRun | None:
        run = self._runs.get(run_id)
        if run is None and (row := await self._catalog.run(run_id)) is not None:
            run = self.cache_run(row)
        return run

    def cache_run(self, row: TrainingRun) -> _KnownRun:
        """Remember a run from its catalog row."""
        run = _KnownRun(
            row.owner,
            placement_of(row),
            spec=ModelSpec.model_validate(row.spec),
            generation=row.generation,
            is_deleted=row.deleted_at is not None,
        )
        self._runs[row.id] = run
        return run

    async def add_sampler(self, row: SamplingSession) -> SamplingSession:
        """Record a sampling session; one that was recorded before is returned as it is.

        Raises:
            InvalidRequest: its number was used for other weights.
        """
        known = await self._catalog.add_sampler(row)
        if _weights(known) != _weights(row):
            index = SamplingSessionId.parse(row.id).index
            raise InvalidRequest(
                f"sampling_session_seq_id {index} was used before in this session for other weights"
            )
        self.cache_sampler(known)
        return known

    async def _sampler(self, sampler_id: str) -> _KnownSampler | None:
        sampler = self._samplers.get(sampler_id)
        if sampler is None and (row := await self._catalog.sampler(sampler_id)) is not None:
            sampler = self.cache_sampler(row)
        return sampler

    def cache_sampler(self, row: SamplingSession) -> _KnownSampler:
        """Remember a sampling session from its catalog row."""
        sampler = _KnownSampler(
            row.owner,
            Placement(row.run_id or row.id, row.owner, row.base_model),
            SamplerSpec(owner=row.owner, model_path=row.model_path, saved_at=row.saved_at),
            row.run_id,
        )
        self._samplers[row.id] = sampler
        return sampler

    async def head_of_run(self, run_id: str) -> HeadEndpoint:
        """Return the head that holds a run, which `authorize_run` has let through.

        Raises:
            StateLost: the head that held it is gone and has not suspended it, or the run was
                deleted.
        """
        run = await self._run(run_id)
        if run is None or run.is_deleted:
            raise StateLost(await self._why_deleted(run_id))
        endpoint = self._provider.find(run.placement)
        if endpoint is None or endpoint.generation != run.generation:
            return await asyncio.shield(self._creation(run_id))
        return endpoint

    def start_placing(self, run_id: str) -> None:
        """Begin to make a run exist on a head; `head_of_run` waits for it."""
        _in_background = self._creation(run_id)

    def _creation(self, run_id: str) -> "asyncio.Task[HeadEndpoint]":
        """Return the attempt to make a run exist, which all callers share."""
        task = self._creating.get(run_id)
        if task is None:
            task = self._creating[run_id] = asyncio.create_task(self._place_run(run_id))
            task.add_done_callback(lambda _: self._creating.pop(run_id, None))
            task.add_done_callback(_retrieve_exception)
        return task

    async def _place_run(self, run_id: str) -> HeadEndpoint:
        """Begin a run on a head, or have another head go on with it."""
        # Read again: another server may have placed the run since it was learned here.
        row = await self._catalog.run(run_id)
        if row is None or row.deleted_at is not None:
            raise StateLost(await self._why_deleted(run_id))
        run, lost = self.cache_run(row), row.generation
        if lost is not None and await self._provider.is_gone(run.placement):
            raise StateLost(await self._lost_message(run_id))
        if lost is not None and self._provider.has_ended(run.placement, lost):
            # Clients learn of a lost run before another head has loaded its model, if it ever does.
            await self._require_suspended(run_id, run, lost)
        endpoint = await self._provider.acquire(run.placement)
        if endpoint.generation == lost:
            return endpoint
        if lost is not None:
            await self._require_suspended(run_id, run, lost)
        spec = run.spec.model_copy(update={"resume_generation": lost}).model_dump_json()
        await self._put(endpoint, f"{routes.HEAD_MODELS}/{run_id}", spec, _RESUME_SECONDS)
        if not await self._catalog.set_generation(run_id, endpoint.generation, after=lost):
            if await self._catalog.deleted_runs([run_id]):
                # Whoever deleted it may have come before the head knew it.
                run.is_deleted = True
                await self._release_run(run_id, run, set())
                raise StateLost(await self._why_deleted(run_id))
            raise Unavailable(f"training run {run_id} was placed elsewhere; send the request again")
        run.generation = endpoint.generation
        if lost is not None:
            log.info("training run resumed", run_id=run_id, generation=endpoint.generation)
        return endpoint

    async def _require_suspended(self, run_id: str, run: _KnownRun, generation: str) -> None:
        """Check that a head has left its state of a run.

        Raises:
            StateLost: it has not; the message says from where to resume.
        """
        unsaved = self._provider.unsaved(run.placement)
        if not await self._checkpoints.is_suspended(run_id, generation, unsaved):
            raise StateLost(await self._lost_message(run_id))

    async def report_lost(self) -> None:
        """Log the runs that heads which have ended since the last call have not saved."""
        for generation in self._provider.newly_ended():
            for row in await self._catalog.runs_of_generation(generation):
                run = self.cache_run(row)
                try:
                    await self._require_suspended(row.id, run, generation)
                except StateLost as error:
                    log.error("a training run is lost", run_id=row.id, reason=error.message)  # noqa: TRY400 - nothing is wrong here
                except Unavailable as error:
                    unsaved = self._provider.unsaved(run.placement)
                    log.warning(
                        "whether a training run is saved is not known yet",
                        run_id=row.id,
                        reason=error.message,
                        folder_of_unsaved_runs=str(unsaved),
                    )

    async def head_of_sampler(self, sampler_id: str) -> HeadEndpoint:
        """Return a head that samples for a session, which `authorize_sampler` has let through.

        Raises:
            SamplerLost: its weights lived only in a head that is gone.
        """
        sampler = await self._sampler(sampler_id)
        if sampler is None:
            raise SamplerLost(f"sampling session {sampler_id} was deleted")
        if sampler.run_id is not None:
            try:
                return await self.head_of_run(sampler.run_id)
            except StateLost as error:
                raise SamplerLost(
                    f"the weights of sampling session {sampler_id} were never saved under a name,"
                    f" and {error.message}"
                ) from None
        endpoint = await self._provider.acquire(sampler.placement)
        if (endpoint.generation, sampler_id) not in self._registered:
            await self._register(endpoint, sampler_id, sampler.spec)
            self._registered.add((endpoint.generation, sampler_id))
        return endpoint

    async def _register(self, endpoint: HeadEndpoint, sampler_id: str, spec: SamplerSpec) -> None:
        """Make a sampling session known to a head."""
        path = f"{routes.HEAD_SAMPLERS}/{sampler_id}"
        *newer, oldest = [
            spec.model_dump_json(exclude_none=True, exclude=unknown)
            for unknown in (set(), {"owner"}, {"owner", "saved_at"})
        ]
        for body in newer:
            # Heads of releases before refuse fields that they do not know.
            with contextlib.suppress(InvalidRequest):
                await self._put(endpoint, path, body, _HEAD_CALL_SECONDS)
                return
        await self._put(endpoint, path, oldest, _HEAD_CALL_SECONDS)

    async def head_of_sample(self, sampler_id: str) -> HeadEndpoint:
        """Return the head that may hold the result of a sample, or that can draw it again.

        Raises:
            SamplerLost: there is none, and never will be.
        """
        sampler = await self._sampler(sampler_id)
        if sampler is None or sampler.run_id is not None:
            return await self.head_of_sampler(sampler_id)
        found = self._provider.find(sampler.placement)
        return found if found is not None else await self._provider.acquire(sampler.placement)

    async def run_of_sampler(self, sampler_id: str) -> str | None:
        """Return the run whose unsaved weights a sampling session holds; None if it holds none."""
        sampler = await self._sampler(sampler_id)
        return sampler.run_id if sampler is not None else None

    async def can_sample_again(self, sampler_id: str) -> bool:
        """Whether a sample whose result is gone can simply be drawn again."""
        sampler = await self._sampler(sampler_id)
        return sampler is not None and sampler.run_id is None

    def run_pending(self, run_id: str) -> Pending:
        """Return why a run that is being created is not there yet."""
        return self._provider.waiting(self._runs[run_id].placement)

    def sampler_pending(self, sampler_id: str) -> Pending:
        """Return why the head of a sampling session is not there yet."""
        return self._provider.waiting(self._samplers[sampler_id].placement)

    async def release(
        self, runs: Sequence[TrainingRun], samplers: Sequence[SamplingSession]
    ) -> None:
        """Free what deleted runs and sampling sessions hold in heads. Repeating it is fine.

        Args:
            runs: all of a session, or of several.
            samplers: of the same sessions.

        What of runs can't be freed now is freed by `release_leftovers`. A head that does not answer
        keeps sampling sessions as long as it lives.
        """
        silent: set[HeadEndpoint] = set()
        for row in runs:
            await _attempt(row.id, self._release_run(row.id, self.cache_run(row), silent))
        await self._remove_samplers(samplers, silent)

    async def _release_run(self, run_id: str, run: _KnownRun, silent: set[HeadEndpoint]) -> None:
        await self._provider.release(run.placement)
        await self._forget(run_id, run, silent)

    async def _forget(self, run_id: str, run: _KnownRun, silent: set[HeadEndpoint]) -> None:
        """Delete a run in its head, if there is one, and what a head has left of it."""
        if (endpoint := self._provider.find(run.placement)) is not None:
            await self._delete(endpoint, f"{routes.HEAD_MODELS}/{run_id}", silent)
        await self._checkpoints.delete_suspended(run_id)

    async def _remove_samplers(
        self, samplers: Sequence[SamplingSession], silent: set[HeadEndpoint]
    ) -> None:
        """Tell heads to let sampling sessions go.

        Those of weights that a run published outlive the run in a head that others share.
        """
        limit = asyncio.Semaphore(_CALLS_AT_ONCE)

        async def retire(row: SamplingSession) -> None:
            async with limit:
                placement = Placement(row.id, row.owner, row.base_model)
                if row.run_id is not None:
                    placement = self._runs[row.run_id].placement
                endpoint = self._provider.find(placement)
                if endpoint is not None and endpoint not in silent:
                    path = f"{routes.HEAD_SAMPLERS}/{row.id}"
                    await _attempt(row.id, self._delete(endpoint, path, silent))

        await asyncio.gather(*[retire(row) for row in samplers])

    async def release_leftovers(self, moment: datetime) -> None:
        """Take away what belongs to runs that are over and could not be taken away then.

        A head that is told to stop suspends what it holds, a deleted run too if it could not be
        told of that; so the store is looked at once more when the head must have ended. What can't
        be taken away now keeps nothing else from it, and is tried again the next time.
        """
        await self._catalog.delete_runs_of_finished_sessions()
        held = self._provider.runs()
        for run_id in await self._catalog.deleted_runs(held):
            if (run := await self._run(run_id)) is not None:
                run.is_deleted = True
                await _attempt(run_id, self._provider.release(run.placement))
        silent: set[HeadEndpoint] = set()
        for run_id in await self._catalog.runs_to_sweep(moment - _HEADS_HAVE_ENDED):
            run = await self._run(run_id)
            if run is not None and run_id not in held:
                await _attempt(run_id, self._sweep(run_id, run, silent))

    async def _sweep(self, run_id: str, run: _KnownRun, silent: set[HeadEndpoint]) -> None:
        await self._forget(run_id, run, silent)
        await self._catalog.mark_swept(run_id)

    def waiting(self) -> "Counter[QueueState]":
        """Return how many runs wait for a head, by the SDK's words for why."""
        return Counter(
            self.run_pending(run_id).queue_state for run_id in self._creating.keys() & self._runs
        )

    async def _delete(self, endpoint: HeadEndpoint, path: str, silent: set[HeadEndpoint]) -> None:
        """Tell a head to let go, but none that was `silent` before; one that is now is added."""
        if endpoint in silent:
            raise Unavailable("the session head did not answer a call before this one")
        try:
            await self._call("DELETE", endpoint, path, None, _HEAD_CALL_SECONDS)
        except Unavailable:
            silent.add(endpoint)
            raise

    async def _put(self, endpoint: HeadEndpoint, path: str, body: str, seconds: float) -> None:
        await self._call("PUT", endpoint, path, body, seconds)

    async def _call(
        self, method: str, endpoint: HeadEndpoint, path: str, body: str | None, seconds: float
    ) -> None:
        try:
            async with self._client.request(
                method,
                endpoint.url + path,
                data=body,
                headers={
                    routes.HEAD_TOKEN_HEADER: endpoint.token,
                    routes.GENERATION_HEADER: endpoint.generation,
                },
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as response:
                if response.status == routes.WRONG_GENERATION_STATUS:
                    self._provider.invalidate(endpoint)
                refusal = {400: InvalidRequest, 410: StateLost}.get(response.status)
                if refusal is not None:
                    raise refusal(str((await response.json())["detail"]))
                response.raise_for_status()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"the session head did not answer: {error}") from None

    async def _why_deleted(self, run_id: str) -> str:
        row = await self._catalog.run(run_id)
        session = await self._catalog.session(row.session_id) if row is not None else None
        expired = session is not None and session.finish_reason == EXPIRED
        why = f" ({session.finish_detail})" if session is not None and expired else ""
        return f"training run {run_id} was deleted{why}; its checkpoints remain"

    async def _lost_message(self, run_id: str) -> str:
        await self._checkpoints.discover(run_id)
        saved = latest(await self._checkpoints.of_run(run_id), CheckpointKind.TRAINING)
        hint = "no checkpoint of it was saved"
        if saved is not None:
            path = saved.tinker_path
            hint = f"resume with create_training_client_from_state_with_optimizer({path!r})"
        return (
            f"the session head that held training run {run_id} has stopped, and what was trained"
            f" since the last checkpoint is lost; {hint}"
        )


def placement_of(row: TrainingRun) -> Placement:
    """Return what a run needs a head for. All of it is in the catalog, for any replica to read."""
    return Placement(
        row.id,
        row.owner,
        row.base_model,
        ModelSpec.model_validate(row.spec),
        SessionOptions.read(row.user_metadata or {}),
    )


def _weights(row: SamplingSession) -> tuple[str, str | None, str | None]:
    """Return what a request for a sampling session says of its weights."""
    return row.base_model, row.model_path, row.run_id


async def _attempt(name: str, release: Awaitable[None]) -> None:
    """Do a part of what frees a run or a sampling session; its failure keeps no other from it."""
    try:
        await release
    except Unavailable as error:
        log.warning("what is over can't be freed yet", of=name, error=error.message)


def _retrieve_exception(task: "asyncio.Task[HeadEndpoint]") -> None:
    """Mark a failed attempt's exception as seen: whoever waits for it has it, or nobody does."""
    if not task.cancelled():
        task.exception()
