"""The head's state: its models, sampling sessions and results; what each request does to them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from tinkercloud_protocol import futures
from tinkercloud_protocol.errors import InvalidRequest, NotFound, Overloaded, Unavailable, WireError
from tinkercloud_protocol.futures import Result
from tinkercloud_protocol.ids import ModelId, RequestId, SamplingSessionId
from tinkercloud_protocol.launch import HeadStatus, HeldModel, ModelSpec, SamplerSpec
from tinkercloud_protocol.payloads import encode_sample_response
from tinkercloud_protocol.sampling import SampleRequest
from tinkercloud_worker.engine.asample import prepare
from tinkercloud_worker.engine.sampler import SamplingRequest
from tinkercloud_worker.head.backend import Backend, random_seed
from tinkercloud_worker.head.idle_memory import IdleMemory
from tinkercloud_worker.head.live_model import LiveModel, new_model
from tinkercloud_worker.head.queue import Operation, Origin, refusal, to_result
from tinkercloud_worker.head.requests import (
    Received,
    body_digest,
    content_digest,
    role_of_unread,
)
from tinkercloud_worker.head.results import Results
from tinkercloud_worker.head.samplers import Samplers
from tinkercloud_worker.head.suspended_models import SuspendedModel, SuspendedModels
from tinkercloud_worker.head.suspension import Suspension

log = structlog.get_logger(__name__)

_SWEEP_SECONDS = 30.0
_SUSPENDED_AT_ONCE = 4
"""Models that are written together; each is in memory twice meanwhile."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sampling request that was found sound, and all that has to be known of it."""

    request: SampleRequest
    """As it came."""
    sound: SamplingRequest
    digest: bytes
    """Equal for equal content."""
    size: int
    """Bytes it takes while it waits."""

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        return _request_id(self.request)


@dataclass(frozen=True, slots=True)
class _Sample:
    """A sampling request that is not finished."""

    request: SampleRequest
    size: int
    task: asyncio.Task[None]


class HeadService:
    """Everything a head knows. Belongs to one event loop; make it inside a running one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        config = backend.config
        self._results = Results(
            config.timings,
            config.limits.max_result_bytes,
            now=time.monotonic,
            on_drop=self._result_dropped,
        )
        self._samplers = Samplers(backend)
        self._suspension = Suspension(backend, self._results, self._samplers)
        self._models: dict[str, LiveModel] = {}
        self._away = SuspendedModels(
            backend, self._models, self._results, self._samplers, self._suspension
        )
        self._resuming: dict[str, asyncio.Task[None]] = {}
        self._accepted: set[str] = set()
        """Of those, this head's own that nothing but the store keeps from being back."""
        self._samples: dict[str, _Sample] = {}
        self._sample_bytes = 0
        self._is_draining = False
        self._suspending = asyncio.Lock()
        self._suspended: set[str] = set()
        self._is_suspended = False
        self._saving = asyncio.Lock()
        self._idle_memory = IdleMemory(backend)
        self._last_activity = time.monotonic()
        self._tasks = {asyncio.create_task(self._sweep())}

    async def create_model(self, model_id: ModelId, spec: ModelSpec) -> str:
        """Begin a model; return the id of the request that does it. Repeating it is fine.

        One that another head has suspended is there, as it was, when this returns.

        Raises:
            InvalidRequest: the model exists with another specification.
            StateLost: it was not suspended by the head that the specification names.
        """
        self._accept()
        name = str(model_id)
        await self.recall(name)
        if name not in self._models and spec.resume_generation is not None:
            await asyncio.shield(self._resumption(model_id, self._resume(model_id, spec)))
        model = self._models.get(name)
        if model is not None and model.spec != spec:
            raise InvalidRequest(
                f"model {model_id} exists with another configuration; use another model_seq_id"
            )
        if model is None:
            model = new_model(model_id, spec, self._backend, self._samplers, self._results)
            self._models[name] = model
            model.queue.submit(0, b"create", 0, Operation(model.operations.create))
        return str(RequestId(model_id, 0))

    def _resumption(
        self, model_id: ModelId, resume: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        """Return the attempt to bring a model back, which all who ask for it share."""
        name = str(model_id)
        task = self._resuming.get(name)
        if task is None:
            task = self._resuming[name] = self._spawn(resume)
            task.add_done_callback(lambda _: self._resuming.pop(name, None))
            task.add_done_callback(lambda _: self._accepted.discard(name))
        else:
            resume.close()
        return task

    async def recall(self, target: str) -> None:
        """Bring back the model that a request is for, if this head has suspended it.

        It stays at least until the caller awaits something else.

        Args:
            target: the model, or the sampling session of its weights.

        Raises:
            Unavailable: it is not back yet, or can't be brought back now.
            InvalidRequest: its suspended state is damaged.
        """
        while (name := self._away.waiting_for(target)) is not None:
            self._accept()
            await self._away.recall(name, self._resume_own)

    async def _resume_own(self, suspended: SuspendedModel) -> None:
        model_id = ModelId.parse(suspended.manifest.run_id)

        def accept() -> None:
            self._accept()
            self._accepted.add(str(model_id))

        async def resume() -> None:
            model, unfinished = await self._suspension.resume(
                model_id, suspended.spec, suspended.manifest, accept
            )
            self._away.came_back(str(model_id))
            self._begin_again(model, unfinished)

        task = self._resumption(model_id, resume())
        await asyncio.wait({task})
        if task.cancelled():
            raise NotFound(f"model {model_id} was deleted")
        task.result()

    async def suspend_model(self, model_id: ModelId) -> bool:
        """Write a model that nobody uses to the object store and free its memory.

        The next request for it brings it back. Repeating this is fine.

        Returns:
            False if it is in use, unknown or can't be written: nothing has changed then.
        """
        name = str(model_id)
        if self._away.get(name) is not None:
            return True
        model = self._models.get(name)
        if model is None or self._is_draining or self._is_used(model):
            return False
        return await self._away.suspend(model)

    def _is_used(self, model: LiveModel) -> bool:
        if model.queue.is_busy:
            return True
        sessions = self._samplers.sessions_of_model(model.model_id)
        return any(s.request.sampling_session_id in sessions for s in self._samples.values())

    def held(self) -> list[HeldModel]:
        """Return the models of this head and what they take."""
        return self._away.held()

    async def _resume(self, model_id: ModelId, spec: ModelSpec) -> None:
        # A head that began to stop meanwhile would not suspend it: it stays where it was.
        model, unfinished = await self._suspension.read(model_id, spec, self._accept)
        self._begin_again(model, unfinished)

    def _begin_again(self, model: LiveModel, unfinished: list[SampleRequest]) -> None:
        """Take in a model that was brought back, and the samples that are to be drawn again."""
        model_id = model.model_id
        self._models[str(model_id)] = model
        # However many they are: they were taken in before.
        for request in unfinished:
            try:
                self._draw(self.prepare(request))
            except InvalidRequest as error:
                request_id = str(_request_id(request))
                self._results.open(request_id, content_digest(request))
                self._results.finish(request_id, futures.failed_with(error))
        log.info("resumed", model_id=str(model_id), waiting=model.queue.sequencer.num_pending)

    async def delete_model(self, model_id: ModelId) -> None:
        """Remove a model. Unknown ones are fine."""
        if (task := self._resuming.get(str(model_id))) is not None:
            task.cancel()
        await self._away.forget(str(model_id))
        model = self._models.pop(str(model_id), None)
        if model is not None:
            model.queue.close(f"model {model_id} was deleted")
            self._results.give_up(str(model_id))
            await model.operations.delete()

    def submit(self, received: Received) -> str:
        """Queue a training request; return its id. One that can't be read fails in its place.

        Raises:
            InvalidRequest: its number can't be used.
            NotFound: the model is unknown.
            Overloaded: too much waits already.
        """
        model = self._model(received.place.model_id)
        if isinstance(received.content, WireError):
            operation = refusal(received.content, role_of_unread(received.path))
        else:
            operation = model.operation(received.content, Origin(received.path, received.body))
        return model.queue.submit(received.place.seq_id, received.digest, received.size, operation)

    def mark_known(self, request_id: str) -> None:
        """Note that a client has been told of a failure in another way than by its future."""
        self._results.mark_read(request_id)

    def _model(self, model_id: str) -> LiveModel:
        self._accept()
        model = self._models.get(model_id)
        if self._away.is_suspending(model_id):
            raise Unavailable(f"model {model_id} is being suspended; send the request again")
        if model is None:
            raise NotFound(f"model {model_id!r} is unknown to this head")
        return model

    def register_sampler(self, session_id: SamplingSessionId, spec: SamplerSpec) -> None:
        """Make a sampling session known. Repeating it is fine."""
        self._accept()
        self._samplers.register(session_id, spec)

    async def retire_sampler(self, session_id: SamplingSessionId) -> None:
        """Forget a sampling session and give up what is being drawn. Unknown ones are fine."""
        for sample in self._samples.values():
            if sample.request.sampling_session_id == str(session_id):
                sample.task.cancel()
        self._results.give_up(str(session_id))
        await self._samplers.retire(session_id)

    def prepare(self, request: SampleRequest) -> Prepared:
        """Check a sampling request. Touches nothing here: may run beside the event loop.

        Raises:
            InvalidRequest: it is unsound.
        """
        backend, as_json = self._backend, request.model_dump_json().encode()
        sound = prepare(request, backend.trainer.limits, backend.end_tokens, random_seed())
        return Prepared(request, sound, body_digest(as_json), len(as_json) + sound.num_bytes)

    def sample(self, prepared: Prepared) -> RequestId:
        """Queue a sampling request; return its id. A repeated one is the same request.

        Raises:
            InvalidRequest: the number was used with other content.
            Overloaded: too many wait already.
        """
        self._accept()
        request_id = prepared.request_id
        known = self._results.digest(str(request_id))
        if known is not None and known != prepared.digest:
            raise InvalidRequest(
                f"seq_id {prepared.request.seq_id} was used before in this sampling session by a"
                " request with other content"
            )
        if known is None:
            self._check_room(prepared)
            self._draw(prepared)
        return request_id

    def _check_room(self, prepared: Prepared) -> None:
        """Check that one more sampling request may wait; one alone always may."""
        config, waiting = self._backend.config, len(self._samples)
        if waiting >= config.sampler.max_queued_requests:
            raise Overloaded(
                f"{waiting} sampling requests wait already; slow down and send this one again"
            )
        if waiting and self._sample_bytes + prepared.size > config.limits.max_queued_bytes:
            raise Overloaded(
                f"{self._sample_bytes} bytes of sampling requests wait already; slow down and send"
                " this one again"
            )
        if not self._results.has_room:
            raise Overloaded(
                f"results of {config.limits.max_result_bytes} bytes and more were not retrieved"
                " yet; retrieve some, or end the sessions they belong to, and send this one again"
            )

    def _draw(self, prepared: Prepared) -> None:
        request, request_id, backend = prepared.request, prepared.request_id, self._backend
        session_id = SamplingSessionId.parse(request.sampling_session_id)
        self._results.open(str(request_id), prepared.digest)

        async def draw() -> Result:
            async with self._samplers.sampling(session_id) as version:
                result = await backend.sampler.sample(version, prepared.sound)
            body = encode_sample_response(result.sequences, result.prompt)
            return Result(body, futures.PROTOBUF)

        def answer_cancelled(task: asyncio.Task[None]) -> None:
            # Even a task that had not begun.
            if task.cancelled():
                self._finish(str(request_id), futures.failed("the request was cancelled", "user"))

        task = self._spawn(self._answer(str(request_id), draw))
        task.add_done_callback(answer_cancelled)
        self._samples[str(request_id)] = _Sample(request, prepared.size, task)
        self._sample_bytes += prepared.size

    async def _answer(self, request_id: str, work: Callable[[], Awaitable[Result]]) -> None:
        try:
            result = await work()
        except Exception as error:  # noqa: BLE001 - whatever it is, its future gets an answer
            result = to_result(error)
        self._finish(request_id, result)

    def _finish(self, request_id: str, result: Result) -> None:
        if (sample := self._samples.pop(request_id, None)) is not None:
            self._sample_bytes -= sample.size
        self._results.finish(request_id, result)

    def cancel(self, request_id: str) -> None:
        """Stop a sampling request nobody waits for. Unknown and finished ones are fine."""
        sample = self._samples.get(request_id)
        if sample is not None:
            sample.task.cancel()

    async def retrieve(self, request_id: str) -> Result | None:
        """Wait for a result; None if it takes longer than a long poll.

        Raises:
            NotFound: the request is unknown, or its result is no longer kept.
        """
        self._last_activity = time.monotonic()
        seconds = self._backend.config.timings.long_poll_seconds
        try:
            async with asyncio.timeout(seconds):
                await self.recall(request_id.rpartition(":")[0])
        except (TimeoutError, Unavailable) as error:
            # The SDK asks again.
            log.info("a result waits for its model", request_id=request_id, reason=str(error))
            return None
        return await self._results.wait(request_id, seconds)

    def status(self) -> HeadStatus:
        """Return what the head reports of itself."""
        config = self._backend.config
        pending = sum(model.queue.sequencer.num_pending for model in self._models.values())
        return HeadStatus(
            head=config.head,
            generation=config.generation,
            model_name=config.model.name,
            ready=not self._is_draining,
            models=sorted(self._models),
            samplers=len(self._samplers),
            pending_requests=pending + len(self._samples),
            idle_seconds=time.monotonic() - self._last_activity,
            suspended=self._is_suspended,
            latest_checkpoint=self._latest_checkpoint(),
        )

    def _latest_checkpoint(self) -> str | None:
        written = [model.operations.latest for model in self._models.values()]
        latest = max((m for m in written if m), key=lambda m: m.created_at, default=None)
        return latest.tinker_path if latest is not None else None

    async def checkpoint(self) -> list[str]:
        """Write a last training checkpoint of every model; return their paths."""
        # What is there is to be saved, however long others would wait for what it lacks.
        self._backend.trainer.stop_waiting()
        async with self._saving:
            models = [m for m in self._models.values() if m.operations.refused is None]
            return [await model.operations.save_last() for model in models]

    async def suspend(self) -> None:
        """Refuse new requests, finish what runs, and write everything else for the next head.

        Repeating it is fine; models that could not be written are tried again.

        Raises:
            Unavailable: some could not be written; the message says which, the log says why.
        """
        self._is_draining = True
        self._backend.trainer.stop_waiting()
        async with self._suspending:
            await self._drain()
            await self._away.settle()
            await self._suspend_all()
            # Those that are accepted already come back all the same, and have left the store.
            if back := [self._resuming[name] for name in self._accepted & self._resuming.keys()]:
                await asyncio.wait(back)
                await self._suspend_all()
            lost = sorted(self._models.keys() - self._suspended)
            if lost:
                raise Unavailable(f"could not suspend {', '.join(lost)}")
            self._is_suspended = True

    async def _suspend_all(self) -> None:
        left = [model for name, model in self._models.items() if name not in self._suspended]
        room = asyncio.Semaphore(_SUSPENDED_AT_ONCE)
        await asyncio.gather(*[self._suspend(model, room) for model in left])

    async def _drain(self) -> None:
        """Give running work some time to finish, then stop answering."""
        work = [asyncio.create_task(model.quiesce()) for model in self._models.values()]
        work += [sample.task for sample in self._samples.values()]
        if work:
            await asyncio.wait(work, timeout=self._backend.config.timings.drain_seconds)
        self._results.freeze()

    async def _suspend(self, model: LiveModel, room: asyncio.Semaphore) -> None:
        await model.queue.pause()
        # Its clients are told to send these uploads again: none may succeed after all.
        await model.cut_off()
        if str(model.model_id) not in self._models:
            # It was deleted meanwhile.
            return
        async with room:
            sessions = self._samplers.sessions_of_model(model.model_id)
            samples = [sample.request for sample in self._samples.values()]
            unfinished = [r for r in samples if r.sampling_session_id in sessions]
            try:
                await self._suspension.write(model, unfinished)
            except Exception:
                log.exception("a model could not be suspended", model_id=str(model.model_id))
            else:
                self._suspended.add(str(model.model_id))
                log.info("suspended", model_id=str(model.model_id))

    def release_waiters(self) -> None:
        """Make clients that wait for a result ask again, elsewhere."""
        self._results.release()

    def close(self) -> None:
        """Stop at once."""
        for model in self._models.values():
            model.queue.close("the session head stopped")
        for task in self._tasks:
            task.cancel()

    def _accept(self) -> None:
        if self._is_draining:
            raise Unavailable("this session head is stopping; send the request again")
        self._last_activity = time.monotonic()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._results.sweep()
            await self._idle_memory.look(self.status())

    def _result_dropped(self, request_id: str) -> None:
        parsed = RequestId.parse(request_id)
        model = self._models.get(str(parsed.target))
        if model is not None:
            model.queue.sequencer.forget(parsed.seq_id)


def _request_id(request: SampleRequest) -> RequestId:
    return RequestId(SamplingSessionId.parse(request.sampling_session_id), request.seq_id)
