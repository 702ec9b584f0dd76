"""One model's requests, run in order: the driver of a `Sequencer`.

Rules beyond order:

- The queue waits for a missing number, but only for `Timings.gap_seconds`.
- A paused queue finishes the running request and starts no other. Another queue can continue from
  its snapshot (`snapshot`, `restore`).
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog

from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.errors import (
    InvalidRequest,
    Overloaded,
    StateLost,
)
from tinkercloud_protocol.wire.future_responses import Result, failed
from tinkercloud_protocol.wire.ids import ModelId, RequestId
from tinkercloud_worker.custom_losses.nursery import LossEnded
from tinkercloud_worker.engine.trainer import GradientLost
from tinkercloud_worker.head.order.awaited_request import AwaitedRequest
from tinkercloud_worker.head.order.between_requests import WorkBetween
from tinkercloud_worker.head.order.journal_interface import NoLog, RequestLog
from tinkercloud_worker.head.order.kept_results import Results
from tinkercloud_worker.head.order.owner_pauses import OwnerPauses
from tinkercloud_worker.head.order.queued_request import (
    Operation,
    QueuedRequest,
    Role,
    refusal,
)
from tinkercloud_worker.head.order.sequencer import Sequencer
from tinkercloud_worker.head.wire.failed_results import (
    error_message,
    to_result,
    too_much,
    with_advice,
)
from tinkercloud_worker.head.wire.token_limits import TokenLimits

log = structlog.get_logger(__name__)

T = TypeVar("T")

_GRADIENT_UNCHANGED_OR_REPORTED = (InvalidRequest, Overloaded, GradientLost, StateLost)
"""Failures of an optim_step that leave the gradient unchanged, or report what happened to it."""

_ATTACHED = "not run: another client has attached to this model and continues its order"


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The state of a paused queue."""

    next_seq_id: int
    waiting: Sequence[QueuedRequest]
    failure: tuple[str, str] | None
    """The failed gradient request of the current step: its id and message."""
    has_dirty_gradient: bool = False
    """Whether the gradient still has to be dropped."""


class FailedStep:
    """What the failure of a request means for its step, and for the gradient.

    When a request that adds to the gradient fails, the gradient is dropped. So are the requests
    that the client sent before it could know of the failure: the rest of that step, up to and
    including its optim_step. Half a batch is never applied.

    When an optim_step fails for any reason other than its own parameters, or memory that its model
    needs first, the gradient is dropped: otherwise a client that sends the step's data again would
    accumulate it twice.
    """

    def __init__(self, drop_gradient: Callable[[], Awaitable[None]]) -> None:
        self._drop_gradient = drop_gradient
        self.failure: tuple[str, str] | None = None
        """The failed gradient request of the current step: its id and message."""
        self.gradient_is_dirty = False
        """Whether the gradient may contain part of a failed request."""

    def note(self, request_id: str, message: str) -> None:
        """Record that a request of the current step failed; the first failure counts."""
        self.failure = self.failure or (request_id, message)

    def known_to(self, results: Results) -> str | None:
        """Return the failed request of the current step if its client has read the failure."""
        if self.failure is None or not results.was_read(self.failure[0]):
            return None
        return self.failure[0]

    def check(self, queued: QueuedRequest) -> None:
        """Check that a request is not part of a step that has failed.

        Raises:
            InvalidRequest: it is; the message says what to send again.
        """
        if self.failure is None or queued.operation.role not in {"gradient", "step"}:
            return
        failed_id, message = self.failure
        if queued.operation.role == "gradient":
            if queued.acknowledged_failure == failed_id:
                self.failure = None
                return
            raise InvalidRequest(
                f"not run: request {failed_id} of the same step failed earlier ({message});"
                " the step's gradient was dropped. Send all data of the step again"
            )
        self.failure = None
        raise InvalidRequest(
            f"not applied: request {failed_id} of this step failed ({message}); the gradient was"
            " dropped and the weights are unchanged. Send the step's data again, then optim_step"
        )

    async def failed(self, request_id: str, role: Role, error: Exception) -> Result:
        """Do what the failure of a request that has run requires; return its result."""
        result = to_result(error)
        if role == "gradient":
            self.note(request_id, error_message(result))
            await self._invalidate_gradient(request_id)
        elif role == "step" and not isinstance(error, _GRADIENT_UNCHANGED_OR_REPORTED):
            await self._invalidate_gradient(request_id)
            result = with_advice(result)
        return result

    async def _invalidate_gradient(self, request_id: str) -> None:
        """Drop the gradient, if possible at once, because of a failed request."""
        self.gradient_is_dirty = True
        try:
            await self.drop_dirty_gradient()
        except Exception as error:
            log.warning(
                "the gradient of a failed step could not be dropped yet",
                request_id=request_id,
                exc_info=error,
            )

    async def drop_dirty_gradient(self) -> None:
        """Drop the gradient if it may contain part of a failed request."""
        if self.gradient_is_dirty:
            await self._drop_gradient()
            self.gradient_is_dirty = False


class ModelQueue:
    """Runs one model's requests. Belongs to one event loop."""

    def __init__(
        self,
        model_id: ModelId,
        results: Results,
        *,
        owner: str,
        max_queued_bytes: int,
        gap_seconds: float,
        drop_gradient: Callable[[], Awaitable[None]],
        token_limits: TokenLimits | None = None,
    ) -> None:
        self._model_id = model_id
        self._results = results
        self._owner = owner
        self.pauses = OwnerPauses()
        self._awaited = AwaitedRequest(gap_seconds, self._gap_timed_out)
        self._step = FailedStep(drop_gradient)
        self._token_limits = token_limits or TokenLimits()
        self.sequencer = Sequencer(max_queued_bytes, next_seq_id=0)
        self._queued: dict[int, QueuedRequest] = {}
        self._repeated: set[int] = set()
        """Numbers of requests that another head had accepted, and that have not run here."""
        self._to_repeat: Sequence[int] = ()
        """These numbers before any had run, in order."""
        self._unnumbered = WorkBetween()
        self.moved_at = time.monotonic()
        """When the last request finished, or the next one arrived if it was the only one."""
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._is_paused = False
        self._is_attaching = False
        """Whether another client is about to continue the order."""
        self._background: set[asyncio.Task[None]] = set()
        self.log: RequestLog = NoLog()
        """Keeps accepted requests for the case that this process is killed."""
        self._worker = asyncio.create_task(self._work())

    def request_id(self, seq_id: int) -> str:
        """Return the id of this model's request of that number."""
        return str(RequestId(self._model_id, seq_id))

    def submit(
        self, seq_id: int, digest: bytes, size: int, operation: Operation, elsewhere: int = 0
    ) -> str:
        """Queue a request and return its id. A repeated one is the same request.

        Args:
            seq_id: its number.
            digest: equal for equal content.
            size: bytes that it takes while it waits.
            operation: what it does.
            elsewhere: bytes in other queues of the same owner.

        Raises:
            InvalidRequest: the number was used with other content, or is out of range.
            Overloaded: the queue is full.
        """
        request_id = self.request_id(seq_id)
        try:
            if not self.sequencer.enqueue(seq_id, digest, size, elsewhere):
                return request_id
        except Overloaded as error:
            if not self.sequencer.is_stuck or self.sequencer.has_room_alone(size):
                raise
            # The SDK sends the first chunk of a call once all others were accepted.
            operation, size = refusal(too_much(error), operation.role), 0
            self.sequencer.admit(seq_id, digest, size)
        queued = QueuedRequest(seq_id, operation, digest, size, self._step.known_to(self._results))
        self.log.append(queued)
        self._enter(queued)
        return request_id

    def _enter(self, queued: QueuedRequest) -> None:
        if not (self._queued or self.sequencer.is_running):
            self.moved_at = time.monotonic()
        self._results.open(self.request_id(queued.seq_id), queued.digest, self._owner)
        self._queued[queued.seq_id] = queued
        self._idle.clear()
        self._arrived.set()

    async def run_after_accepted(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work after the requests that have arrived by now, and before all later ones.

        Requests behind a missing number run later. A queue that is closed first runs nothing.

        Raises:
            Unavailable: the queue was closed.
            Exception: any exception that the work raises.
        """
        return await self._run_before(self.sequencer.first_missing, work)

    async def _run_before(self, seq_id: int, work: Callable[[], Awaitable[T]]) -> T:
        outcome = self._unnumbered.add(seq_id, work)
        self._idle.clear()
        self._arrived.set()
        return await outcome

    def hold(self) -> None:
        """Start no request from now on, except the model's creation."""
        self._is_paused = True

    async def idle(self) -> None:
        """Return once no request is running, and none can run."""
        await self._idle.wait()

    async def pause(self) -> None:
        """Start no request except the model's creation; return once none is running."""
        self.hold()
        self._awaited.watch(None)
        await self._idle.wait()

    def unpause(self) -> None:
        """Continue after `pause`."""
        self._is_paused = False
        self._arrived.set()

    async def attach(self, repeated_until: int = -1) -> int:
        """Let another client continue the order; return the number of its first request.

        The running request finishes. Those that wait fail, as do later ones of the client before,
        and the gradient is dropped.

        Args:
            repeated_until: the last request that another head may have run, so that its client may
                have read the result. Those up to it run first, unless a number is missing.

        Raises:
            Unavailable: the queue was closed.
        """
        following = min(repeated_until + 1, self.sequencer.first_missing)

        async def hold() -> None:
            self._is_attaching = True

        try:
            if following > self.sequencer.next_seq_id:
                await self._run_before(following, hold)
            self._is_attaching = True
            await self._idle.wait()
            for seq_id in self.sequencer.hand_over():
                del self._queued[seq_id]
                self._results.finish(self.request_id(seq_id), failed(_ATTACHED, "user"))
        finally:
            self._is_attaching = False
            self._arrived.set()
        self._step.failure, self._step.gradient_is_dirty = None, True
        self.log.note_change()
        self.wake()
        # Otherwise the next head would repeat the requests that have just failed.
        await self.log.change_kept()
        return self.sequencer.next_seq_id

    @property
    def is_busy(self) -> bool:
        """Whether a request is running or could run.

        Requests that wait for a missing number, or for results to be retrieved, could not.
        """
        sequencer = self.sequencer
        can_run = not (sequencer.is_stuck or self.is_throttled)
        waits = bool(sequencer.num_pending) and (sequencer.is_running or can_run)
        return waits or bool(self._background)

    @property
    def is_throttled(self) -> bool:
        """Whether the next request waits for its owner: to retrieve results, or for tokens."""
        following = self._queued.get(self.sequencer.next_seq_id)
        is_large = following is not None and following.operation.has_large_result
        limits, results = self._token_limits, self._results
        return is_large and not (results.has_room(self._owner) and limits.has_room(self._owner))

    @property
    def is_followed(self) -> bool:
        """Whether a request has arrived that computes as soon as the running one has ended.

        May be read on any thread. The result of the running one may still leave it no room.
        """
        following = self._queued.get(self.sequencer.next_seq_id + 1)
        if following is None or not following.operation.computes_at_once:
            return False
        is_held = self._is_paused or self._is_attaching or self._step.failure is not None
        is_large, owner = following.operation.has_large_result, self._owner
        is_throttled = is_large and (
            self._token_limits.is_used_up(owner) or not self._results.has_room(owner)
        )
        is_work_between = bool(self._unnumbered) or self.log.is_due_at_boundary
        return not (is_held or is_throttled or is_work_between)

    def wake(self) -> None:
        """Start the next request, if it no longer has to wait."""
        self._arrived.set()

    def why_waiting(self, seq_id: int) -> tuple[future_responses.QueueState, str | None]:
        """Return why a request has no result yet, in the SDK's terms and in words."""
        sequencer, name = self.sequencer, self.request_id(self.sequencer.next_seq_id)
        if self.is_throttled:
            waits = self._token_limits.why_waiting(self._owner)
            waits = waits or self._results.backlog(self._owner)
            return "paused_rate_limit", f"request {name} is paused: {waits}"
        if sequencer.is_stuck and seq_id in self._queued:
            return "active", self._awaited.why_waiting(name)
        if self.repetition is not None or seq_id not in self._queued:
            return "active", self.repetition
        return (
            "active",
            f"{seq_id - sequencer.next_seq_id} earlier requests of this model run first",
        )

    @property
    def repetition(self) -> str | None:
        """How many requests that another head had accepted have run here; None if all have."""
        num_done = bisect_left(self._to_repeat, self.sequencer.next_seq_id)
        if num_done >= len(self._to_repeat):
            return None
        return (
            f"repeating what the run's last session head had accepted: {num_done} of"
            f" {len(self._to_repeat)} requests done"
        )

    @property
    def background(self) -> Set[asyncio.Task[None]]:
        """Tasks of requests that finish in the background, such as uploads."""
        return frozenset(self._background)

    def snapshot(self) -> QueueSnapshot:
        """Return the state of the queue, which must be paused."""
        waiting = [self._queued[seq_id] for seq_id in sorted(self._queued)]
        return QueueSnapshot(
            self.sequencer.next_seq_id, waiting, self._step.failure, self._step.gradient_is_dirty
        )

    def restore(self, state: QueueSnapshot) -> None:
        """Continue from a snapshot of another queue of this model. Call it first."""
        self.sequencer.next_seq_id = state.next_seq_id
        self._step.failure = state.failure
        for waiting in state.waiting:
            self.sequencer.admit(waiting.seq_id, waiting.digest, waiting.size)
            self._enter(waiting)
            self._repeated.add(waiting.seq_id)
        for seq_id in self.sequencer.drop_before_hand_over():
            del self._queued[seq_id]
            self._repeated.discard(seq_id)
            self._results.finish(self.request_id(seq_id), failed(_ATTACHED, "user"))
        self._to_repeat = sorted(self._repeated)

    def close(self, reason: str) -> None:
        """Stop; requests that have not run fail with this reason."""
        self._worker.cancel()
        self.hold()
        self._awaited.close()
        for seq_id in self._queued:
            self._results.finish(self.request_id(seq_id), failed(reason, "server"))
        if self.sequencer.is_running:
            running = self.request_id(self.sequencer.next_seq_id)
            self._results.finish(running, failed(reason, "server"))
        self._unnumbered.close(reason)
        self._idle.set()

    async def _work(self) -> None:
        while True:
            await self._unnumbered.run_due(self.sequencer)
            await self.log.at_boundary()
            is_held = self._is_paused or self._is_attaching
            is_on_hold = is_held and self.sequencer.next_seq_id > 0
            is_throttled = self.is_throttled
            self.pauses.note(is_paused=is_throttled)
            if self.sequencer.cross_hand_over():
                self._step.failure, self._step.gradient_is_dirty = None, True
            seq_id = None if is_on_hold or is_throttled else self.sequencer.take()
            # Also if one is taken: it may be the missing one, and run for longer than the wait.
            has_gap = self.sequencer.is_stuck and not self._is_paused
            self._awaited.watch(self.sequencer.next_seq_id if has_gap else None)
            if seq_id is None:
                self._idle.set()
                await self._arrived.wait()
                self._arrived.clear()
                continue
            await self._run(seq_id, self._queued.pop(seq_id))
            self.sequencer.finish()
            self.moved_at = time.monotonic()

    async def _run(self, seq_id: int, queued: QueuedRequest) -> None:
        request_id = self.request_id(seq_id)
        try:
            self._step.check(queued)
            if queued.operation.role not in {"load", "other"}:
                await self._step.drop_dirty_gradient()
            outcome = await self._execute(queued)
            if queued.operation.role == "load":
                # The load replaced the gradient, and with it the rest of the current step.
                self._step.failure, self._step.gradient_is_dirty = None, False
        except Exception as error:  # noqa: BLE001 - the future must resolve, whatever it is
            if not isinstance(error, InvalidRequest):
                # Repeated by another head, it might succeed, although its client has been informed
                # of the failure: keep the outcome.
                self.log.note_change()
            if isinstance(error, LossEnded):
                # No head may compute it once more, even if it is asked before that is kept.
                self.log.append(replace(queued, operation=refusal(error, queued.operation.role)))
            self._finish(seq_id, await self._step.failed(request_id, queued.operation.role, error))
            return
        if isinstance(outcome, Result):
            self._finish(seq_id, outcome)
        else:
            task = asyncio.create_task(self._finish_in_background(seq_id, outcome))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _execute(self, queued: QueuedRequest) -> Result | Awaitable[Result]:
        if queued.seq_id not in self._repeated:
            return await queued.operation.run()
        self._repeated.discard(queued.seq_id)
        async with self.log.repeating(queued.seq_id):
            return await queued.operation.run()

    def _finish(self, seq_id: int, result: Result) -> None:
        request_id = self.request_id(seq_id)
        self.log.release(seq_id, lambda: self._results.finish(request_id, result))

    async def _finish_in_background(self, seq_id: int, outcome: Awaitable[Result]) -> None:
        try:
            result = await outcome
        except Exception as error:  # noqa: BLE001 - as in _run
            result = to_result(error)
        self._finish(seq_id, result)

    def _gap_timed_out(self, missing: int) -> None:
        if not self.sequencer.is_stuck or self.sequencer.next_seq_id != missing:
            # It has arrived, and waits for what runs between two requests, or was skipped.
            return
        message = self._awaited.why_dropped(missing)
        log.warning(
            "a missing request did not arrive in time",
            model_id=str(self._model_id),
            missing_seq_id=missing,
        )
        # The missing request may have been part of the gradient.
        self._step.gradient_is_dirty = True
        self.log.note_change()
        for seq_id in self.sequencer.skip_gap():
            del self._queued[seq_id]
            request_id = self.request_id(seq_id)
            self._step.note(request_id, message)
            self._results.finish(request_id, failed(message, "user"))
        self._arrived.set()
