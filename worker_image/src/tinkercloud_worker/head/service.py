"""The head's state: its models, sampling sessions and results; what each request does to them."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tinkercloud_protocol import futures
from tinkercloud_protocol.errors import InvalidRequest, NotFound, Unavailable, WireError
from tinkercloud_protocol.futures import Result
from tinkercloud_protocol.ids import ModelId, RequestId, SamplingSessionId
from tinkercloud_protocol.launch import HeadStatus, ModelSpec, SamplerSpec
from tinkercloud_protocol.payloads import ForwardBackwardRequest, encode_sample_response
from tinkercloud_protocol.sampling import SampleRequest
from tinkercloud_protocol.training import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkercloud_worker.engine.sampler import prepare
from tinkercloud_worker.head.backend import Backend, random_seed
from tinkercloud_worker.head.operations import Operations
from tinkercloud_worker.head.queue import ModelQueue, Operation, Role, refusal, to_result
from tinkercloud_worker.head.results import Results
from tinkercloud_worker.head.samplers import Samplers

_SWEEP_SECONDS = 30.0

OrderedRequest = (
    ForwardBackwardRequest
    | OptimStepRequest
    | SaveWeightsRequest
    | SaveWeightsForSamplerRequest
    | LoadWeightsRequest
)


@dataclass(slots=True, eq=False)
class LiveModel:
    """A model and its queue."""

    spec: ModelSpec
    operations: Operations
    queue: ModelQueue


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
        self._models: dict[str, LiveModel] = {}
        self._samples: dict[str, asyncio.Task[None]] = {}
        self._is_draining = False
        self._last_activity = time.monotonic()
        self._tasks = {asyncio.create_task(self._sweep())}

    def create_model(self, model_id: ModelId, spec: ModelSpec) -> str:
        """Begin a model; return the id of the request that does it. Repeating it is fine.

        Raises:
            InvalidRequest: the model exists with another specification.
        """
        self._accept()
        model = self._models.get(str(model_id))
        if model is not None and model.spec != spec:
            raise InvalidRequest(
                f"model {model_id} exists with another configuration; use another model_seq_id"
            )
        if model is None:
            limits, timings = self._backend.config.limits, self._backend.config.timings
            operations = Operations(model_id, spec, self._backend, self._samplers)
            queue = ModelQueue(
                model_id,
                self._results,
                max_queued_bytes=limits.max_queued_bytes,
                gap_seconds=timings.gap_seconds,
                drop_gradient=operations.drop_gradient,
            )
            model = self._models[str(model_id)] = LiveModel(spec, operations, queue)
        return model.queue.submit(0, b"create", 0, Operation(model.operations.create))

    async def delete_model(self, model_id: ModelId) -> None:
        """Let a model go. Unknown ones are fine."""
        model = self._models.pop(str(model_id), None)
        if model is not None:
            model.queue.close(f"model {model_id} was deleted")
            await model.operations.delete()

    def submit(self, request: OrderedRequest, size: int) -> str:
        """Queue a training request; return its id.

        Raises:
            InvalidRequest: its number can't be used.
            NotFound: the model is unknown.
            Overloaded: too much waits already.
        """
        model, operation = self._operation(request)
        assert request.seq_id is not None  # noqa: S101 - the in-place forms carry one
        return model.queue.submit(request.seq_id, content_digest(request), size, operation)

    def refuse(self, model_id: str, seq_id: int, body: bytes, role: Role, error: WireError) -> str:
        """Let a request that can't be read take its place in the order, and fail there."""
        model = self._model(model_id)
        return model.queue.submit(seq_id, body_digest(body), 0, refusal(error, role))

    def mark_known(self, request_id: str) -> None:
        """Note that a client has been told of a failure in another way than by its future."""
        self._results.mark_read(request_id)

    def _operation(self, request: OrderedRequest) -> tuple[LiveModel, Operation]:
        model = self._model(request.model_id or "")
        operations = model.operations
        match request:
            case ForwardBackwardRequest():
                role: Role = "other" if request.forward_only else "gradient"
                return model, Operation(lambda: operations.forward_backward(request), role)
            case OptimStepRequest():
                return model, Operation(lambda: operations.optim_step(request), "step")
            case SaveWeightsRequest():
                return model, Operation(lambda: operations.save_weights(request))
            case SaveWeightsForSamplerRequest():
                return model, Operation(lambda: operations.save_weights_for_sampler(request))
            case LoadWeightsRequest():
                return model, Operation(lambda: operations.load_weights(request))

    def _model(self, model_id: str) -> LiveModel:
        self._accept()
        model = self._models.get(model_id)
        if model is None:
            raise NotFound(f"model {model_id!r} is unknown to this head")
        return model

    def register_sampler(self, session_id: SamplingSessionId, spec: SamplerSpec) -> None:
        """Make a sampling session known. Repeating it is fine."""
        self._accept()
        self._samplers.register(session_id, spec)

    async def retire_sampler(self, session_id: SamplingSessionId) -> None:
        """Forget a sampling session. Unknown ones are fine."""
        await self._samplers.retire(session_id)

    def sample(self, request: SampleRequest) -> RequestId:
        """Queue a sampling request; return its id. A repeated one is the same request.

        Raises:
            InvalidRequest: the number was used with other content, or the request is unsound.
            Overloaded: too many wait already.
        """
        self._accept()
        session_id = SamplingSessionId.parse(request.sampling_session_id)
        request_id, digest = RequestId(session_id, request.seq_id), content_digest(request)
        known = self._results.digest(str(request_id))
        if known is not None and known != digest:
            raise InvalidRequest(
                f"seq_id {request.seq_id} was used before in this sampling session by a request"
                " with other content"
            )
        if known is None:
            backend = self._backend
            sound = prepare(request, backend.trainer.limits, backend.end_tokens, random_seed())
            self._results.open(str(request_id), digest)

            async def draw() -> Result:
                version = await self._samplers.version(session_id)
                result = await backend.sampler.sample(version, sound)
                body = encode_sample_response(result.sequences, result.prompt)
                return Result(body, futures.PROTOBUF)

            self._samples[str(request_id)] = self._spawn(self._answer(str(request_id), draw))
        return request_id

    async def _answer(self, request_id: str, work: Callable[[], Awaitable[Result]]) -> None:
        try:
            result = await work()
        except asyncio.CancelledError:
            result = futures.failed("the request was cancelled", "user")
        except Exception as error:  # noqa: BLE001 - whatever it is, its future gets an answer
            result = to_result(error)
        self._samples.pop(request_id, None)
        self._results.finish(request_id, result)

    def cancel(self, request_id: str) -> None:
        """Stop a sampling request nobody waits for. Unknown and finished ones are fine."""
        task = self._samples.get(request_id)
        if task is not None:
            task.cancel()

    async def retrieve(self, request_id: str) -> Result | None:
        """Wait for a result; None if it takes longer than a long poll.

        Raises:
            NotFound: the request is unknown, or its result is no longer kept.
        """
        self._last_activity = time.monotonic()
        return await self._results.wait(request_id, self._backend.config.timings.long_poll_seconds)

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
        )

    async def drain(self) -> None:
        """Refuse new requests, and finish those that have been accepted."""
        self._is_draining = True
        await asyncio.gather(*[model.queue.drain() for model in self._models.values()])
        await asyncio.gather(*self._samples.values())

    def release_waiters(self) -> None:
        """Let everyone who waits for a result that is not there ask again, somewhere else."""
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

    def _result_dropped(self, request_id: str) -> None:
        parsed = RequestId.parse(request_id)
        model = self._models.get(str(parsed.target))
        if model is not None:
            model.queue.sequencer.forget(parsed.seq_id)


def content_digest(request: ForwardBackwardRequest | BaseModel) -> bytes:
    """Return a digest that is equal for requests with equal content."""
    if isinstance(request, ForwardBackwardRequest):
        return request.digest()
    return body_digest(request.model_dump_json().encode())


def body_digest(body: bytes) -> bytes:
    """Return a digest of raw bytes."""
    return hashlib.blake2b(body, digest_size=16).digest()
