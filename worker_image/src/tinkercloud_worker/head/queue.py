"""One model's requests, run in order: the driver of a `Sequencer`.

Rules beyond order:

- A missing number is waited for, but not for ever (`Timings.gap_seconds`).
- A queue that is paused finishes what runs and begins nothing; what it has then (`state`) can be
  given to another queue (`restore`), which goes on with it.
- When a request that adds to the gradient fails, the gradient is dropped, and so are the requests
  that were sent before the client could know: the rest of that step's, up to and including its
  optim_step. Half a batch is never applied.
- When an optim_step fails for another reason than its own parameters, the gradient is dropped: a
  client that sends the step's data again must not find the first copy of it there.
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import orjson
import structlog

from tinkercloud_protocol import futures
from tinkercloud_protocol.errors import InvalidRequest, Overloaded, StateLost, WireError
from tinkercloud_protocol.futures import Result, failed, failed_with
from tinkercloud_protocol.ids import ModelId, RequestId
from tinkercloud_worker.engine.trainer import GradientLost
from tinkercloud_worker.head.results import Results
from tinkercloud_worker.head.sequencer import Sequencer

log = structlog.get_logger(__name__)

Role = Literal["gradient", "step", "save", "load", "other"]
"""Whether a request adds to the gradient, applies, saves or replaces it, or does none of these."""

_TELL_OF_THE_GRADIENT = (InvalidRequest, GradientLost, StateLost)
"""Failures of an optim_step that leave the gradient as it is, or say what has become of it."""

REFUSED = "refused"
"""Path in the origin of a request that failed before it took its place; the body says why."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What another process needs to make an operation again."""

    path: str
    """Of the request (`protocol.routes`), or `REFUSED`."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Operation:
    """A request that has been read.

    `run` either returns the result or a coroutine that will, which then no longer holds up the
    requests that follow (an upload, say).
    """

    run: Callable[[], Awaitable[Result | Awaitable[Result]]]
    role: Role = "other"
    origin: Origin | None = None
    """None for a request that begins a model, which never waits."""
    has_large_result: bool = False
    """Whether it is not begun while unread results fill the owner's budget (`Results.has_room`)."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that has its place in the order and has not begun."""

    seq_id: int
    operation: Operation
    digest: bytes
    size: int
    """Of its body, in bytes."""
    knows_of: str | None
    """The failed request whose failure the client had read when it sent this one."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """Where a paused queue stands."""

    next_seq_id: int
    waiting: Sequence[Waiting]
    failure: tuple[str, str] | None
    """The failed gradient request of the step that is being built: its id and message."""
    has_dirty_gradient: bool = False
    """Whether the gradient is yet to be dropped."""


def _too_much(error: Overloaded) -> InvalidRequest:
    return InvalidRequest(
        f"data: {error.message}, and none of it can begin before all of this call is here; send its"
        " data in several calls before optim_step: their gradients add up"
    )


def refusal(error: WireError, role: Role = "other") -> Operation:
    """Return an operation that takes its place in the order and fails."""

    async def run() -> Result:
        raise error

    return Operation(run, role, Origin(REFUSED, failed_with(error).body))


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
    ) -> None:
        self._model_id = model_id
        self._results = results
        self._owner = owner
        self._gap_seconds = gap_seconds
        self._drop_gradient = drop_gradient
        self.sequencer = Sequencer(max_queued_bytes, next_seq_id=0)
        self._queued: dict[int, Waiting] = {}
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._gap_timer: asyncio.TimerHandle | None = None
        self._missing: int | None = None
        """The number that the timer waits for."""
        self._failure: tuple[str, str] | None = None
        """The failed gradient request of the step that is being built: its id and message."""
        self._holds_half = False
        """Whether part of a failed request may be in the gradient."""
        self._is_paused = False
        self._later: set[asyncio.Task[None]] = set()
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
            elsewhere: bytes that wait in other queues of the same owner.

        Raises:
            InvalidRequest: the number was used with other content, or cannot come now.
            Overloaded: too much waits already.
        """
        request_id = self.request_id(seq_id)
        try:
            if not self.sequencer.offer(seq_id, digest, size, elsewhere):
                return request_id
        except Overloaded as error:
            if not self.sequencer.is_stuck or self.sequencer.has_room_alone(size):
                raise
            # The SDK sends a call's first part once all others are taken in.
            operation, size = refusal(_too_much(error), operation.role), 0
            self.sequencer.admit(seq_id, digest, size)
        knows_of = None
        if self._failure is not None and self._results.was_read(self._failure[0]):
            knows_of = self._failure[0]
        self._enter(Waiting(seq_id, operation, digest, size, knows_of))
        return request_id

    def _enter(self, waiting: Waiting) -> None:
        self._results.open(self.request_id(waiting.seq_id), waiting.digest, self._owner)
        self._queued[waiting.seq_id] = waiting
        self._idle.clear()
        self._arrived.set()

    async def pause(self) -> None:
        """Begin nothing more, except to create the model; return once nothing runs."""
        self._is_paused = True
        self._watch_gap()
        await self._idle.wait()

    def unpause(self) -> None:
        """Continue after `pause`."""
        self._is_paused = False
        self._arrived.set()

    @property
    def is_busy(self) -> bool:
        """Whether anything runs, or could.

        What waits for a missing number, or until results are retrieved, can't.
        """
        sequencer = self.sequencer
        can_run = not (sequencer.is_stuck or self.is_held_back)
        waits = bool(sequencer.num_pending) and (sequencer.is_running or can_run)
        return waits or bool(self._later)

    @property
    def is_held_back(self) -> bool:
        """Whether the next request waits until results of earlier ones are retrieved."""
        following = self._queued.get(self.sequencer.next_seq_id)
        is_large = following is not None and following.operation.has_large_result
        return is_large and not self._results.has_room(self._owner)

    def look_again(self) -> None:
        """Begin the next request, if it was held back and need not be any more."""
        self._arrived.set()

    def why_waiting(self, seq_id: int) -> tuple[futures.QueueState, str | None]:
        """Return why a request has no result yet, in the SDK's terms and in words."""
        sequencer, name = self.sequencer, self.request_id(self.sequencer.next_seq_id)
        if self.is_held_back:
            return "paused_rate_limit", f"{name} is not run: {self._results.crowding(self._owner)}"
        if seq_id not in self._queued:
            return "active", None
        if sequencer.is_stuck:
            reason = f"{name} has not arrived, and requests run in the order of their numbers"
            return "active", f"{reason}; it is waited for up to {self._gap_seconds:.0f} s"
        return "active", f"{seq_id - sequencer.next_seq_id} requests of this model come before it"

    @property
    def later(self) -> Set[asyncio.Task[None]]:
        """Work in the background."""
        return frozenset(self._later)

    def state(self) -> QueueState:
        """Return where a paused queue stands."""
        waiting = [self._queued[seq_id] for seq_id in sorted(self._queued)]
        return QueueState(self.sequencer.next_seq_id, waiting, self._failure, self._holds_half)

    def restore(self, state: QueueState) -> None:
        """Go on where another queue of this model was paused. Call it before anything else."""
        self.sequencer.next_seq_id = state.next_seq_id
        self._failure = state.failure
        for waiting in state.waiting:
            self.sequencer.admit(waiting.seq_id, waiting.digest, waiting.size)
            self._enter(waiting)

    def close(self, reason: str) -> None:
        """Stop; what has not run fails with this reason."""
        self._worker.cancel()
        if self._gap_timer is not None:
            self._gap_timer.cancel()
        for seq_id in self._queued:
            self._results.finish(self.request_id(seq_id), failed(reason, "server"))
        if self.sequencer.is_running:
            running = self.request_id(self.sequencer.next_seq_id)
            self._results.finish(running, failed(reason, "server"))
        self._idle.set()

    async def _work(self) -> None:
        while True:
            is_resting = self._is_paused and self.sequencer.next_seq_id > 0
            seq_id = None if is_resting or self.is_held_back else self.sequencer.take()
            if seq_id is None:
                self._watch_gap()
                self._idle.set()
                await self._arrived.wait()
                self._arrived.clear()
                continue
            await self._run(seq_id, self._queued.pop(seq_id))
            self.sequencer.finish()

    async def _run(self, seq_id: int, queued: Waiting) -> None:
        request_id = self.request_id(seq_id)
        try:
            self._check_step(queued)
            if queued.operation.role not in {"load", "other"}:
                await self._drop_half()
            outcome = await queued.operation.run()
            if queued.operation.role == "load":
                # What is left of the step that was being built went with the gradient.
                self._failure, self._holds_half = None, False
        except Exception as error:  # noqa: BLE001 - whatever it is, its future gets an answer
            result = to_result(error)
            if queued.operation.role == "gradient":
                self._failure = self._failure or (request_id, error_message(result))
                await self._lose_gradient(request_id)
            elif queued.operation.role == "step" and not isinstance(error, _TELL_OF_THE_GRADIENT):
                await self._lose_gradient(request_id)
                result = _with_advice(result)
            self._results.finish(request_id, result)
            return
        if isinstance(outcome, Result):
            self._results.finish(request_id, outcome)
        else:
            task = asyncio.create_task(self._finish_later(request_id, outcome))
            self._later.add(task)
            task.add_done_callback(self._later.discard)

    async def _finish_later(self, request_id: str, outcome: Awaitable[Result]) -> None:
        try:
            result = await outcome
        except Exception as error:  # noqa: BLE001 - as in _run
            result = to_result(error)
        self._results.finish(request_id, result)

    def _check_step(self, queued: Waiting) -> None:
        """Refuse what belongs to a step that has failed already."""
        if self._failure is None or queued.operation.role not in {"gradient", "step"}:
            return
        failed_id, message = self._failure
        if queued.operation.role == "gradient":
            if queued.knows_of == failed_id:
                self._failure = None
                return
            raise InvalidRequest(
                f"not run: request {failed_id} of the same step failed before it ({message});"
                " the step's gradient was dropped, send all of its data again"
            )
        self._failure = None
        raise InvalidRequest(
            f"not applied: request {failed_id} of this step failed ({message}); the gradient was"
            " dropped and the weights are unchanged. Send the step's data again, then optim_step"
        )

    async def _lose_gradient(self, request_id: str) -> None:
        self._holds_half = True
        try:
            await self._drop_half()
        except Exception as error:
            log.warning("a gradient is yet to be dropped", request_id=request_id, exc_info=error)

    async def _drop_half(self) -> None:
        if self._holds_half:
            await self._drop_gradient()
            self._holds_half = False

    def _watch_gap(self) -> None:
        is_waited_for = self.sequencer.is_stuck and not self._is_paused
        missing = self.sequencer.next_seq_id if is_waited_for else None
        if missing == self._missing:
            # What arrives behind the gap does not prolong the wait.
            return
        if self._gap_timer is not None:
            self._gap_timer.cancel()
            self._gap_timer = None
        self._missing = missing
        if missing is not None:
            loop = asyncio.get_running_loop()
            self._gap_timer = loop.call_later(self._gap_seconds, self._give_up_gap)

    def _give_up_gap(self) -> None:
        missing = self.sequencer.next_seq_id
        message = (
            f"seq_id {missing} did not arrive within {self._gap_seconds:.0f} s, so the requests"
            " that waited for it were dropped; create a new training client from a checkpoint"
        )
        log.warning("gave up a gap", model_id=str(self._model_id), missing_seq_id=missing)
        # The missing one may have been a part of the gradient.
        self._holds_half = True
        for seq_id in self.sequencer.skip_gap():
            del self._queued[seq_id]
            request_id = self.request_id(seq_id)
            self._failure = self._failure or (request_id, message)
            self._results.finish(request_id, failed(message, "user"))
        self._arrived.set()


def error_message(result: Result) -> str:
    """Return the message of a terminal failure."""
    return str(orjson.loads(result.body)["error"])


def _with_advice(result: Result) -> Result:
    """Return the failure of an optim_step whose gradient was dropped, saying so."""
    answer = orjson.loads(result.body)
    return failed(
        f"{answer['error']}; the gradient was dropped: send the step's data again, then optim_step",
        answer["category"],
    )


def to_result(error: Exception) -> Result:
    """Return the terminal failure an exception becomes; unexpected ones are logged, not shown."""
    if isinstance(error, WireError):
        return failed_with(error)
    log.error("request failed unexpectedly", exc_info=error)
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return failed(
            "the session head's disk is full (no space left on device): the server's operator must"
            " make room in its scratch folder, then send the request again",
            "server",
        )
    return failed(
        f"internal error ({type(error).__name__}); the head's log has the details", "server"
    )
