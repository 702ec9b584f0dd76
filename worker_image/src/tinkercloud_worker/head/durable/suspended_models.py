"""Models of a running head that are in the object store instead of its memory.

When a client has been inactive for long, its models are suspended: each is written like the models
of a stopping head (`suspension`), and its memory is freed. The next request for the model, or for a
sampler of its weights, resumes it. Requests that arrive while it is being suspended or resumed
wait.

The stored state carries this head's generation. If the head dies, another head resumes the model
from it. A model that is resumed here diverges from the stored state, which is therefore withdrawn
before any of the model's requests run.

A model can also be *moved*: it is suspended although it is in use, for another head to continue.
From then on requests for it fail with `Moved`, and it is never resumed here from that state, unless
it is *taken back* because there is no other head for it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import structlog

from tinkercloud_protocol.heads.launch import HeldModel
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_protocol.wire.ids import SamplingSessionId
from tinkercloud_worker.device.memory import return_free_memory
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.durable.durable_runs import Durability
from tinkercloud_worker.head.durable.suspension import Suspension
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.model.model_lifetime import WRITING, ModelEvent, ModelPlace, ModelState
from tinkercloud_worker.head.model.model_registry import ModelRegistry, SuspendedModel
from tinkercloud_worker.head.sampling.unfinished_sample import Sample
from tinkercloud_worker.head.wire.failed_results import Moved

log = structlog.get_logger(__name__)

_RECALL_SECONDS = 45.0
"""How long a request waits for its model: less than the API server waits for a response."""
_NOT_CREATED_SECONDS = 900.0
"""How long a model is not accepted that was moved before this head knew it: longer than an API
server tries to place a model here, so that a late attempt cannot create a second copy."""
_REMEMBERED = 1 << 12
"""Moved models that are remembered by name."""
_FREEING = frozenset({ModelState.LEAVING, ModelState.DROPPING})
"""States in which the memory of a model is freed that another head continues."""


class SuspendedModels:
    """Suspends single models and tracks them. Belongs to one event loop."""

    def __init__(
        self,
        backend: Backend,
        models: ModelRegistry,
        suspension: Suspension,
        durability: Durability,
    ) -> None:
        """Start without suspended models.

        Args:
            backend: the head's.
            models: the models of the head. The service adds resumed ones.
            suspension: writes models.
            durability: the journals of the models in memory.
        """
        self._backend = backend
        self._models = models
        self._results = suspension.results
        self._samplers = suspension.samplers
        self._suspension = suspension
        self._durability = durability
        durability.on_taken_over = self._taken_over

    def owner_of(self, target: str) -> str | None:
        """Return the owner of a suspended or moved model, or of a sampling session of one."""
        stored = self._models.stored(self._models.model_of(target))
        return stored.spec.owner if stored is not None else None

    def held(self) -> list[HeldModel]:
        """Return all models of the head, those in memory first, and the memory they take."""
        suspended = []
        for name in self._models.names(ModelPlace.STORE):
            stored = self._models.stored(name)
            step = stored.manifest.step if stored is not None else None
            suspended.append(HeldModel(model_id=name, is_suspended=True, step=step))
        return [self._describe(model) for model in self._models.in_memory.values()] + suspended

    def _describe(self, model: LiveModel) -> HeldModel:
        name, sessions = str(model.model_id), self._samplers.sessions_of_model(model.model_id)
        published = self._samplers.of_model(model.model_id)
        run = self._durability.of(name)
        queue_state, queue_reason = model.next_request()
        return HeldModel(
            model_id=name,
            is_durable=run is not None and run.degraded is None,
            degraded=run.degraded if run is not None else None,
            model_bytes=self._backend.trainer.memory_bytes(name),
            sampler_bytes=sum(sampler.size_bytes for sampler in published),
            result_bytes=sum(self._results.bytes_of(target) for target in (name, *sessions)),
            step=model.operations.steps,
            is_repeating=model.queue.repetition is not None,
            queue_state=queue_state,
            queue_reason=queue_reason,
            waiting_seconds=model.waiting_seconds,
            tokens_per_minute=self._backend.usage.tokens_per_minute(name),
            unsaved_steps=model.operations.schedule.unsaved,
            autosave_failure=model.operations.schedule.failure,
        )

    async def suspend(self, model: LiveModel) -> bool:
        """Suspend an idle model and free its memory; return whether that succeeded.

        If it fails, the model continues unchanged, and the log says why.
        """
        name = str(model.model_id)
        task = self._models.task(name)
        if task is None:
            task = self._start(model, ModelEvent.SUSPEND, self._suspend(name, model))
        return bool(await asyncio.shield(task))

    def _start(
        self, model: LiveModel, event: ModelEvent, work: Coroutine[Any, Any, bool]
    ) -> asyncio.Task[bool]:
        """Start to suspend or move a model; requests for it wait for that from now on."""
        name, task = str(model.model_id), asyncio.create_task(work)
        self._models.apply(name, event)
        self._models.start(name, task)
        self._route_sessions(model)
        return task

    def _route_sessions(self, model: LiveModel) -> set[str]:
        """Let requests for the sampling sessions of a model wait for it; return the sessions."""
        sessions = self._samplers.sessions_of_model(model.model_id)
        self._models.route(sessions, str(model.model_id))
        return sessions

    async def _suspend(self, name: str, model: LiveModel) -> bool:
        try:
            await model.queue.pause()
            await model.queue.log.settled()
            manifest = await self._suspension.write_all(model)
            self._check_held(name, model)
        except BaseException as error:
            self._stay(name, model, error)
            if not isinstance(error, Exception):
                raise
            return False
        sessions = self._samplers.sessions_of_model(model.model_id)
        self._models.store(name, SuspendedModel(model.spec, frozenset(sessions), manifest))
        try:
            await self._durability.remove(name)
            await self._free(model, sessions, [])
        finally:
            self._models.apply(name, ModelEvent.FREED)
        log.info("suspended an inactive model", model_id=name)
        return True

    def _check_held(self, name: str, model: LiveModel) -> None:
        """Check that the model was not taken over while it was written.

        Raises:
            Moved: it was.
        """
        if self._models.in_memory.get(name) is not model:
            raise Moved(name)

    def _stay(self, name: str, model: LiveModel, error: BaseException) -> None:
        """Continue a model that could not be written, unless another head has taken it over."""
        if self._models.in_memory.get(name) is not model:
            return
        if isinstance(error, Moved):
            self._taken_over(name)
            return
        log.warning("suspending a model failed; it stays in memory", model_id=name, exc_info=error)
        self._models.apply(name, ModelEvent.NOT_STORED)
        model.queue.unpause()

    async def move(self, name: str, samples: Mapping[str, Sample]) -> None:
        """Let another head continue a model: write it, in use or not, and free its memory.

        It is neither being suspended nor being resumed.

        Its running request finishes here; requests that wait, results, and running samples continue
        there. Idempotent. A model that is unknown here is not accepted for some time: an API server
        may be about to create it here.

        Args:
            name: its id.
            samples: all unfinished sampling requests of the head.

        Raises:
            Unavailable: it can't be written now; it continues here unchanged.
        """
        if (model := self._models.in_memory.get(name)) is not None:
            task = self._start(model, ModelEvent.MOVE, self._release(name, model, samples))
            await asyncio.wait({task})
            # Another head may have taken it over meanwhile.
            if self._models.state(name).place is not ModelPlace.ELSEWHERE:
                raise Unavailable(f"model {name} could not be written; it was not moved")
        elif self._models.state(name) is ModelState.SUSPENDED:
            self._models.apply(name, ModelEvent.MOVE)
        elif self._models.state(name) is ModelState.ABSENT:
            self._models.refuse(name, time.monotonic())
        self._models.forget_moved(_REMEMBERED)

    def take_back(self, name: str) -> None:
        """Continue a moved model here after all; no other head may have resumed it. Idempotent.

        It is suspended then, and the next request for it resumes it. It is not being moved.

        Raises:
            Moved: another head has taken it over.
        """
        state = self._models.state(name)
        if state is ModelState.TAKEN_OVER:
            raise Moved(name)
        if state.is_moved:
            self._models.apply(name, ModelEvent.TAKE_BACK)
        if state is ModelState.MOVED:
            log.info("took a model back", model_id=name)

    async def _release(self, name: str, model: LiveModel, samples: Mapping[str, Sample]) -> bool:
        targets = {name}
        try:
            await model.quiesce()
            await model.queue.log.settled()
            # The last request may have published weights.
            sessions = self._route_sessions(model)
            targets |= sessions
            self._results.hold_back(targets)
            running = [s for s in samples.values() if s.request.sampling_session_id in sessions]
            unfinished = [each.request for each in running]
            manifest = await self._suspension.write_all(model, unfinished)
            self._check_held(name, model)
        except BaseException as error:
            self._stay(name, model, error)
            self._results.give_out(targets)
            if not isinstance(error, Exception):
                raise
            return False
        # In one step, so that no request finds neither the model nor this record.
        self._models.store(name, SuspendedModel(model.spec, frozenset(sessions), manifest))
        try:
            await self._durability.remove(name)
            await self._free(model, sessions, [each.task for each in running])
        finally:
            self._models.apply(name, ModelEvent.FREED)
        self._results.give_out(targets)
        log.info("another head continues a model", model_id=name)
        return True

    def _taken_over(self, name: str) -> None:
        """Free a model that another head has taken over, without notifying this head."""
        if (model := self._models.in_memory.get(name)) is None:
            return
        sessions, writing = self._route_sessions(model), self._models.task(name)
        self._models.apply(name, ModelEvent.TAKE_OVER)
        task = asyncio.create_task(self._drop(name, model, sessions, writing))
        self._models.start(name, task)
        self._models.forget_moved(_REMEMBERED)

    async def _drop(
        self, name: str, model: LiveModel, sessions: set[str], writing: asyncio.Task[Any] | None
    ) -> None:
        try:
            await self._durability.drop(name)
            await self._free(model, sessions, [])
            if writing is not None:
                await asyncio.wait({writing})
        finally:
            self._models.apply(name, ModelEvent.FREED)

    async def accept_back(self, name: str) -> None:
        """Prepare for a model that another head has suspended.

        Raises:
            Moved: it was moved before it arrived here; this may be a late attempt to create it.
            Unavailable: its memory here is still being freed.
        """
        try:
            async with asyncio.timeout(_RECALL_SECONDS):
                if self._models.state(name) in _FREEING and (task := self._models.task(name)):
                    await asyncio.wait({task})
        except TimeoutError:
            raise _still_resuming(name) from None
        state = self._models.state(name)
        if state is ModelState.REFUSED:
            since = self._models.refused_since(name)
            if time.monotonic() - since < _NOT_CREATED_SECONDS:
                raise Moved(name)
        if state.is_moved:
            self._models.apply(name, ModelEvent.ARRIVE)

    async def _free(
        self, model: LiveModel, sessions: set[str], running: Sequence[asyncio.Task[None]]
    ) -> None:
        """Free the memory of a stored model, whose running samples end."""
        for target in (str(model.model_id), *sessions):
            self._results.discard(target)
        model.queue.close("the model was suspended")
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        try:
            for session in sessions:
                await self._samplers.leave(SamplingSessionId.parse(session))
            await model.operations.delete()
        except Exception:
            log.exception(
                "failed to free the memory of a suspended model", model_id=str(model.model_id)
            )
        await asyncio.to_thread(return_free_memory)

    def waiting_for(self, target: str) -> str | None:
        """Return the model to resume for a request; None if there is none.

        Args:
            target: the model or sampling session that the request is for.

        Raises:
            Moved: another head continues the model.
        """
        name = self._models.model_of(target)
        state = self._models.state(name)
        if state.is_moved:
            raise Moved(name)
        return name if state.waits else None

    async def recall(
        self, name: str, resume: Callable[[SuspendedModel], Coroutine[Any, Any, None]]
    ) -> None:
        """Resume a model that is suspended or being suspended.

        Args:
            name: its id.
            resume: resumes it and adds it to the models; concurrent callers share the attempt.

        Raises:
            Unavailable: it is not resumed yet, or can't be resumed now.
        """
        try:
            async with asyncio.timeout(_RECALL_SECONDS):
                if self._models.state(name).is_written and (task := self._models.task(name)):
                    await asyncio.wait({task})
                if self._models.state(name).place is ModelPlace.STORE and (
                    suspended := self._models.stored(name)
                ):
                    await resume(suspended)
        except TimeoutError:
            raise _still_resuming(name) from None

    async def settle(self) -> None:
        """Wait until no model is being suspended or moved."""
        while tasks := self._models.tasks(*WRITING):
            await asyncio.wait(tasks)


def _still_resuming(name: str) -> Unavailable:
    return Unavailable(f"model {name} is still being resumed; send the request again")
