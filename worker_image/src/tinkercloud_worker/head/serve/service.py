"""The head's state (models, sampling sessions, results) and what each request does to it."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import structlog

from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.heads.launch import HeadStatus, HeldModel, ModelSpec, SamplerSpec
from tinkercloud_protocol.heads.request_timeline import Timeline
from tinkercloud_protocol.requests.sampling_requests import SampleRequest
from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, Unavailable
from tinkercloud_protocol.wire.future_responses import Result
from tinkercloud_protocol.wire.ids import ModelId, RequestId, SamplingSessionId
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.durable.durable_runs import Durability
from tinkercloud_worker.head.durable.kept_runs import KeptRuns
from tinkercloud_worker.head.durable.recovery import Recovery
from tinkercloud_worker.head.durable.suspended_models import SuspendedModels
from tinkercloud_worker.head.durable.suspension import Suspension
from tinkercloud_worker.head.model.autosaver import Autosaver
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.model.model_lifetime import ModelEvent, ModelPlace, ModelState
from tinkercloud_worker.head.model.model_registry import ModelRegistry
from tinkercloud_worker.head.order.kept_results import Results
from tinkercloud_worker.head.order.requests import Prepared, Received
from tinkercloud_worker.head.sampling.samplers import Samplers
from tinkercloud_worker.head.serve.models.model_creation import ModelCreation
from tinkercloud_worker.head.serve.models.model_deletion import ModelDeletion
from tinkercloud_worker.head.serve.models.model_restoration import ModelRestoration
from tinkercloud_worker.head.serve.reports import head_status, why_sample_waits
from tinkercloud_worker.head.serve.retrieval import LONG_POLL, Poll, Retrieval
from tinkercloud_worker.head.serve.running_samples import RunningSamples
from tinkercloud_worker.head.serve.shutdown import HeadShutdown

log = structlog.get_logger(__name__)


class HeadService:
    """All state of a head. Belongs to one event loop; create it inside the running loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        config = backend.config
        self.results = Results(
            config.timings,
            config.limits.max_result_bytes,
            now=time.monotonic,
            on_drop=self._result_dropped,
            on_room=self._wake_queues,
            on_read=self._result_read,
        )
        """The results of all requests."""
        backend.token_limits.listen(self._wake_queues)
        self._samplers = Samplers(backend)
        self._retrieval = Retrieval(backend, self.results, self._samplers, self.recall)
        self._suspension = Suspension(backend, self.results, self._samplers)
        self.durability = Durability(backend, self._suspension)
        """The journals of the models."""
        self._recovery = Recovery(self._suspension, self.durability)
        self.models = ModelRegistry()
        """The models, and the state of each."""
        self._suspended = SuspendedModels(backend, self.models, self._suspension, self.durability)
        self.samples = RunningSamples(backend, self._samplers, self.results, self._recovery)
        """The sampling requests; they are submitted through `sample`."""
        self._is_draining = False
        self._restoration = ModelRestoration(
            self.models,
            self._recovery,
            self._suspended,
            self._add_resumed,
            self._check_accepting,
            self._spawn,
        )
        self._kept = KeptRuns(
            self.durability, backend.store, self.models, self._restoration.recover_kept
        )
        self._shutdown = HeadShutdown(
            backend,
            self.models,
            self.samples.by_id,
            self._suspension,
            self._suspended,
            self.durability,
            self._kept,
        )
        self._autosaver = Autosaver(self.models.in_memory)
        self._creation = ModelCreation(
            self._suspension, self.models, self.durability, self._autosaver, self._spawn
        )
        self._deletion = ModelDeletion(
            self.models, self.results, self.durability, self._autosaver, self._spawn
        )
        self._last_activity = time.monotonic()
        self._tasks = set[asyncio.Task[None]]()

    async def create_model(self, model_id: ModelId, spec: ModelSpec) -> str:
        """Create a model; return the id of the request that does so. Idempotent.

        A model that another head suspended has been restored when this returns.

        Raises:
            InvalidRequest: the model exists with another specification.
            StateLost: the head that the specification names did not suspend it.
        """
        self._check_accepting()
        name = str(model_id)
        if spec.resume_generation is not None:
            await self._suspended.accept_back(name)
        model = await self._restoration.in_memory(model_id, spec)
        if model is not None and not model.fits(spec):
            raise InvalidRequest(
                f"model {model_id} already exists with a different configuration; use another"
                " model_seq_id"
            )
        if model is None:
            self._creation.begin(model_id, spec)
        if self.models.state(name) is ModelState.NEW and (beginning := self.models.task(name)):
            # Shared by all callers: its result can be asked for only once it is queued.
            await asyncio.shield(beginning)
        return str(RequestId(model_id, 0))

    async def attach_model(self, model_id: str) -> int:
        """Let another client continue a model's order (`ModelQueue.attach`)."""
        model = self._model(model_id)
        return await model.queue.attach(model.operations.repeated_until)

    def step_of(self, model_id: str) -> int:
        """Return the number of optimizer steps that a model in memory has taken."""
        return self._model(model_id).operations.steps

    async def save_model(self, model_id: str, name: str | None) -> CheckpointManifest:
        """Write a training checkpoint of a model in memory (`Operations.save_state`)."""
        return await self._model(model_id).operations.save_state(name)

    def timeline(self, session_id: str) -> Timeline:
        """Return when the requests of a session were accepted, started and finished."""
        return Timeline(spans=self._backend.spans.of_session(session_id))

    def owner_of(self, target: str) -> str:
        """Return the owner of a model or sampling session; an empty name if it is unknown."""
        return self._samplers.owner_of(target) or self._suspended.owner_of(target) or ""

    def _wake_queues(self, owner: str) -> None:
        for model in self.models.of_owner(owner):
            model.queue.wake()

    async def recall(self, target: str) -> None:
        """Resume the model that a request is for, if need be (`ModelRestoration.recall`)."""
        await self._restoration.recall(target)

    async def suspend_model(self, model_id: ModelId) -> bool:
        """Write an unused model to the store; free its memory until its next request. Idempotent.

        Returns:
            False if it is in use, unknown or can't be written; nothing has changed then.
        """
        name = str(model_id)
        state = self.models.state(name)
        if state.place is ModelPlace.STORE:
            return True
        model = self.models.in_memory.get(name)
        if model is None or state is ModelState.NEW or self._is_draining or self._is_used(model):
            return False
        return await self._suspended.suspend(model)

    def _is_used(self, model: LiveModel) -> bool:
        if model.queue.is_busy:
            return True
        sessions = self._samplers.sessions_of_model(model.model_id)
        return any(s.request.sampling_session_id in sessions for s in self.samples.by_id.values())

    async def move_model(self, model_id: ModelId, *, is_back: bool = False) -> None:
        """Let another head continue a model, or take it back; see `SuspendedModels`."""
        name = str(model_id)
        await self._settled(name)
        if is_back:
            self._suspended.take_back(name)
            return
        if self.models.state(name).may_be_kept:
            if (failure := await self._kept.load_all(name)) is not None:
                raise Unavailable(f"model {name} can't be moved yet: {failure.message}")
            # Another call may have waited for the same, and be moving it.
            await self._settled(name)
        await self._suspended.move(name, self.samples.by_id)

    async def _settled(self, name: str) -> None:
        """Wait until no task changes the state of a model (`_check_accepting`)."""
        # A request may start to resume it as soon as it has been suspended.
        while task := self.models.task(name):
            await asyncio.wait({task})
        self._check_accepting()

    def held(self) -> list[HeldModel]:
        """Return the models of this head and the memory they take."""
        return self._suspended.held()

    def _add_resumed(self, model: LiveModel, unfinished: list[SampleRequest]) -> None:
        """Add a resumed model, and restart its unfinished sampling requests."""
        model_id = model.model_id
        self.models.add(str(model_id), ModelEvent.RESTORED, model)
        self._autosaver.watch(model)
        if self._is_draining:
            model.queue.hold()
        for request in unfinished:
            self.samples.restart(request, model.spec.owner)
        log.info("resumed", model_id=str(model_id), waiting=model.queue.sequencer.num_pending)

    async def delete_model(self, model_id: ModelId) -> None:
        """Remove a model, which may be unknown."""
        await self._deletion.delete(str(model_id))

    def submit(self, received: Received, key: str | None = None) -> str:
        """Queue a training request; return its id (`LiveModel.submit`).

        Raises:
            NotFound: the model is unknown.
        """
        model = self._model(received.place.model_id)
        return model.submit(received, key, self.models.of_owner(model.spec.owner), self.results)

    async def accepted(self, model_id: str) -> None:
        """Return once the requests of a model so far may be confirmed to clients."""
        await self._model(model_id).queue.log.accepted()

    def _model(self, model_id: str) -> LiveModel:
        self._check_accepting()
        model = self.models.in_memory.get(model_id)
        if self.models.state(model_id).is_written:
            raise Unavailable(f"model {model_id} is being suspended; send the request again")
        if model is None:
            raise NotFound(f"model {model_id!r} does not exist on this session head")
        return model

    def register_sampler(self, session_id: SamplingSessionId, spec: SamplerSpec) -> None:
        """Register a sampling session. Idempotent."""
        self._check_accepting()
        self._samplers.register(session_id, spec)

    async def retire_sampler(self, session_id: SamplingSessionId) -> None:
        """Remove a sampling session, which may be unknown, and cancel its requests."""
        self.samples.cancel_of(session_id)
        self.results.abandon(str(session_id))
        await self._samplers.retire(session_id)

    def sample(self, prepared: Prepared) -> RequestId:
        """Queue a sampling request; return its id (`RunningSamples.submit`)."""
        self._check_accepting()
        return self.samples.submit(prepared)

    async def retrieve(self, request_id: str, poll: Poll = LONG_POLL) -> Result | None:
        """Wait for a result (`Retrieval.retrieve`)."""
        self._last_activity = time.monotonic()
        return await self._retrieval.retrieve(request_id, poll)

    def why_waiting(self, request_id: str) -> tuple[future_responses.QueueState, str | None]:
        """Return why a request has no result yet, in the SDK's terms and in words."""
        parsed = RequestId.parse(request_id)
        if (model := self.models.in_memory.get(str(parsed.target))) is not None:
            return model.why_waiting(parsed.seq_id)
        return why_sample_waits(
            request_id, self.samples.by_id, self.samples.limiter, self._backend.token_limits
        )

    def status(self) -> HeadStatus:
        """Return the head's status."""
        return head_status(
            self._backend,
            self.models.in_memory,
            self._shutdown,
            num_samplers=len(self._samplers),
            num_samples=len(self.samples.by_id),
            idle_seconds=time.monotonic() - self._last_activity,
            is_draining=self._is_draining,
        )

    async def checkpoint(self, only: str = "") -> list[str]:
        """Write an automatic training checkpoint of every model, or of one; return the paths.

        Raises:
            WireError: some could not be written; the others were.
        """
        if not only:
            # Save what there is now, rather than wait for trainers that are still starting.
            self._backend.trainer.stop_waiting()
        try:
            failure = None if self._is_draining else await self._kept.repeat(only)
        except Unavailable as error:
            failure = error
        saved = await self._autosaver.save_last(only)
        if failure is not None:
            raise failure
        return saved

    async def suspend(self, store: CheckpointStore | None = None) -> None:
        """Reject new requests, finish running ones, and write all state for the next head.

        Idempotent; a repeated call retries models that could not be written.

        Args:
            store: where to write; None for the checkpoint store.

        Raises:
            Unavailable: some models could not be written; the message says which and why.
        """
        self._is_draining = True
        self._autosaver.close()
        if beginning := self.models.tasks(ModelState.NEW, ModelState.ENDING):
            await asyncio.wait(beginning)
        await self._shutdown.suspend(store or self._backend.store)

    def close(self) -> None:
        """Stop immediately."""
        self._autosaver.close()
        self.durability.close()
        for model in self.models.in_memory.values():
            model.queue.close("the session head stopped")
        self.samples.close()
        for task in self._tasks:
            task.cancel()

    def _check_accepting(self) -> None:
        if self._is_draining:
            raise Unavailable("this session head is stopping; send the request again")
        self._last_activity = time.monotonic()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _result_read(self, request_id: str) -> None:
        if (model := self.models.in_memory.get(request_id.rpartition(":")[0])) is not None:
            model.queue.log.record_read(request_id)

    def _result_dropped(self, request_id: str) -> None:
        parsed = RequestId.parse(request_id)
        model = self.models.in_memory.get(str(parsed.target))
        if model is not None:
            model.queue.sequencer.forget(parsed.seq_id)
            model.given_numbers.forget(parsed.seq_id)
