"""A model in memory: its specification, operations and request queue."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tinkercloud_protocol.heads.launch import ModelSpec, RunQueueState
from tinkercloud_protocol.requests.tensors import ForwardBackwardRequest
from tinkercloud_protocol.requests.training_requests import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkercloud_protocol.wire.errors import Overloaded, Unavailable, WireError
from tinkercloud_protocol.wire.future_responses import QueueState
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.model.operations import NOT_CREATED, Operations
from tinkercloud_worker.head.order.kept_results import Results
from tinkercloud_worker.head.order.queue import ModelQueue
from tinkercloud_worker.head.order.queued_request import Operation, RequestSource, Role, refusal
from tinkercloud_worker.head.order.requests import OrderedRequest, Received, role_of_unread
from tinkercloud_worker.head.order.unnumbered import GivenNumbers
from tinkercloud_worker.head.sampling.samplers import Samplers
from tinkercloud_worker.head.wire.request_times import SpanRecorder


@dataclass(slots=True, eq=False)
class LiveModel:
    """A model in memory and its request queue."""

    model_id: ModelId
    spec: ModelSpec
    operations: Operations
    queue: ModelQueue
    given_numbers: GivenNumbers
    spans: SpanRecorder
    lineage: list[str]
    """Generations of the heads that suspended it, oldest first."""
    lacks_journal: str | None = None
    """Why it could not be created again to continue its journal; None if it could."""

    def check_complete(self) -> None:
        """Check that the model has what its journal has, so that its state may replace it.

        Raises:
            Unavailable: the model could not be created again, for example for lack of memory.
        """
        if self.lacks_journal is not None:
            raise Unavailable(
                f"model {self.model_id} could not be created again to continue its journal, which"
                f" stays: {self.lacks_journal}"
            )

    def fits(self, spec: ModelSpec) -> bool:
        """Return whether a specification is the model's, or continues an earlier head's."""
        if spec.resume_generation in self.lineage:
            spec = spec.model_copy(update={"resume_generation": self.spec.resume_generation})
        return self.spec == spec

    def submit(
        self, received: Received, key: str | None, of_owner: Iterable["LiveModel"], results: Results
    ) -> str:
        """Queue a request; return its id. An unreadable one fails in its place.

        Args:
            received: the request; one without a number is given the next free one.
            key: the idempotency key of a request without a number.
            of_owner: all models of the owner, who has one limit for what they queue.
            results: the results of the head.

        Raises:
            InvalidRequest: its number or key can't be used.
            Overloaded: the queue is full, or too many results have not been retrieved.
        """
        others = [each.queue.sequencer for each in of_owner if each is not self]
        elsewhere = sum(each.queued_bytes for each in others)
        if received.is_numbered:
            return self._enqueue(received, elsewhere, results)
        seq_id = self.given_numbers.number(key, received.digest)
        self.queue.log.record_key(seq_id, key)
        try:
            request_id = self._enqueue(received.numbered(seq_id), elsewhere, results)
        except BaseException:
            # Another request may get this number.
            self.queue.log.record_key(seq_id, None)
            raise
        self.given_numbers.record(seq_id, key)
        return request_id

    def _enqueue(self, received: Received, elsewhere: int, results: Results) -> str:
        seq_id = received.place.seq_id
        if isinstance(received.content, ForwardBackwardRequest):
            results.check_room(self.queue.request_id(seq_id), self.spec.owner)
        operation = self._operation_of(received)
        return self.queue.submit(seq_id, received.digest, received.size, operation, elsewhere)

    def _operation_of(self, received: Received) -> Operation:
        """Return the operation of a received request; that of an unreadable one fails."""
        if isinstance(received.content, WireError):
            return refusal(received.content, role_of_unread(received.path))
        operation = self.operation(received.content, RequestSource(received.path, received.body))
        pauses, owner = self.queue.pauses, self.spec.owner
        timed = self.spans.timed(
            str(self.model_id), _name_of(received), owner, operation.run, pauses.seconds_before
        )
        return replace(operation, run=timed)

    def creation(self, refused: WireError | None) -> Operation:
        """Return the operation that creates the model, or fails if the model was refused."""
        if refused is None:
            return Operation(self.operations.create)
        self.operations.refuse(refused.message)
        return refusal(refused)

    def operation(self, request: OrderedRequest, source: RequestSource) -> Operation:
        """Return the operation of a request."""
        operations, role = self.operations, role_of(request)
        match request:
            case ForwardBackwardRequest():
                return Operation(
                    lambda: operations.forward_backward(request),
                    role,
                    source,
                    has_large_result=True,
                    computes_at_once=request.loss_fn != "custom" and not request.images,
                )
            case OptimStepRequest():
                return Operation(
                    lambda: operations.optim_step(request), role, source, computes_at_once=True
                )
            case SaveWeightsRequest():
                return Operation(lambda: operations.save_weights(request), role, source)
            case SaveWeightsForSamplerRequest():
                return Operation(lambda: operations.save_weights_for_sampler(request), role, source)
            case SaveWeightsExternalRequest():
                return Operation(lambda: operations.save_weights_external(request), role, source)
            case LoadWeightsRequest():
                return Operation(lambda: operations.load_weights(request), role, source)

    def why_waiting(self, seq_id: int) -> tuple[QueueState, str | None]:
        """Return why a request has no result yet, in the SDK's terms and in words."""
        state, reason = self.queue.why_waiting(seq_id)
        return state, reason or self.operations.engine.why_waiting()

    def next_request(self) -> tuple[RunQueueState, str | None]:
        """Return what the next request waits for, and why, if that is known."""
        sequencer = self.queue.sequencer
        if not sequencer.num_pending:
            return "idle", None
        state, reason = self.queue.why_waiting(sequencer.free_seq_id - 1)
        if state == "paused_rate_limit":
            return "paused_rate_limit", reason
        if not sequencer.is_stuck:
            reason = self.operations.engine.why_waiting() or self.queue.repetition
        return ("running" if reason is None else "waiting"), reason

    @property
    def waiting_seconds(self) -> float:
        """For how long there have been requests, of which none has finished; 0 without any."""
        queue = self.queue
        return time.monotonic() - queue.moved_at if queue.sequencer.num_pending else 0.0

    async def quiesce(self) -> None:
        """Pause the queue; return once nothing runs, not even in the background."""
        await self.queue.pause()
        if self.queue.background:
            await asyncio.wait(self.queue.background)

    async def abort_background(self) -> None:
        """Cancel background work, and return once it has ended."""
        background = self.queue.background
        for task in background:
            task.cancel()
        if background:
            await asyncio.wait(background)


def role_of(request: OrderedRequest) -> Role:
    """Return the role of a request in the current step."""
    match request:
        case ForwardBackwardRequest():
            return "other" if request.forward_only else "gradient"
        case OptimStepRequest():
            return "step"
        case SaveWeightsRequest():
            return "save"
        case LoadWeightsRequest():
            return "load"
        case _:
            return "other"


def _name_of(received: Received) -> str:
    """Return the name of the call: SDKs send `forward` as a forward_backward without gradients."""
    if isinstance(received.content, ForwardBackwardRequest) and received.content.forward_only:
        return "forward"
    return received.path.rpartition("/")[2]


def new_model(
    model_id: ModelId, spec: ModelSpec, backend: Backend, samplers: Samplers, results: Results
) -> LiveModel:
    """Return a model that has not been created in the trainer and has no requests."""
    limits, timings = backend.config.limits, backend.config.timings
    samplers.record_owner(model_id, spec.owner)
    operations = Operations(model_id, spec, backend, samplers)
    queue = ModelQueue(
        model_id,
        results,
        owner=spec.owner,
        max_queued_bytes=limits.max_queued_bytes,
        gap_seconds=timings.gap_seconds,
        drop_gradient=operations.drop_gradient,
        token_limits=backend.token_limits,
    )
    operations.engine.is_followed = lambda: queue.is_followed
    samplers.current.add(str(model_id), operations, queue.run_after_accepted)
    given_numbers = GivenNumbers(queue.sequencer)
    return LiveModel(model_id, spec, operations, queue, given_numbers, backend.spans, lineage=[])


def too_many_models(models: Sequence[LiveModel], owner: str, limit: int | None) -> WireError | None:
    """Return the error if an owner, whose models these are, can't have another one."""
    theirs = [model for model in models if model.operations.refused in {None, NOT_CREATED}]
    if limit is None or len(theirs) < limit:
        return None
    names = ", ".join(str(model.model_id) for model in theirs[:3])
    return Overloaded(
        f"owner {owner!r} already has {len(theirs)} models here ({names}"
        f"{', ...' if len(theirs) > 3 else ''}; limits.max_models_per_owner is {limit}): delete"
        " a finished session (`tinkercloud sessions delete SESSION`), then create it again"
    )


def latest_checkpoint(models: Iterable[LiveModel]) -> str | None:
    """Return the path of the latest checkpoint of these models, except automatic ones."""
    written = [model.operations.checkpoints.latest for model in models]
    latest = max((each for each in written if each), key=lambda m: m.created_at, default=None)
    return latest.tinker_path if latest is not None else None
