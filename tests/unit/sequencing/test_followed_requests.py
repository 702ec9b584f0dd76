"""A queue says that a running request is followed only if the next one computes at once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from tinkercloud_protocol.heads.launch import Timings
from tinkercloud_protocol.heads.owner_limits import OwnerLimits
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.future_responses import Result, finished
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_worker.head.order.journal_interface import NoLog
from tinkercloud_worker.head.order.kept_results import Results
from tinkercloud_worker.head.order.queue import ModelQueue
from tinkercloud_worker.head.order.queued_request import Operation, Role, refusal
from tinkercloud_worker.head.wire.token_limits import TokenLimits

MAX_RESULT_BYTES = 100


class DueLog(NoLog):
    """Has something to do at the next boundary."""

    @property
    def is_due_at_boundary(self) -> bool:
        return True


@dataclass
class Bench:
    """A queue whose first request runs until the test lets it end."""

    limits: TokenLimits = field(default_factory=lambda: TokenLimits(lambda: 0.0))
    results: Results = field(
        default_factory=lambda: Results(Timings(), MAX_RESULT_BYTES, now=lambda: 0.0)
    )
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[object]] = field(default_factory=list)
    queue: ModelQueue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = ModelQueue(
            ModelId("s", 0),
            self.results,
            owner="me",
            max_queued_bytes=1 << 20,
            gap_seconds=60,
            drop_gradient=self.do_nothing,
            token_limits=self.limits,
        )
        self.queue.sequencer.next_seq_id = 1

    async def do_nothing(self) -> None: ...

    async def run(self) -> Result:
        await self.may_end.wait()
        return finished({})

    def submit(self, seq_id: int, operation: Operation) -> None:
        self.queue.submit(seq_id, b"%d" % seq_id, 1, operation)

    def operation(self, role: Role) -> Operation:
        is_large = role == "gradient"
        return Operation(self.run, role, has_large_result=is_large, computes_at_once=True)

    def begin(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Begin what waits for the running request."""
        self.tasks.append(asyncio.ensure_future(work()))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    made.submit(1, made.operation("gradient"))
    await asyncio.sleep(0)
    yield made
    made.queue.close("the test is over")
    for task in made.tasks:
        task.cancel()


@pytest.mark.parametrize("role", ["gradient", "step"])
async def test_a_batch_and_a_step_that_have_arrived_follow(bench: Bench, role: Role) -> None:
    assert not bench.queue.is_followed

    bench.submit(2, bench.operation(role))

    assert bench.queue.is_followed


async def test_a_request_behind_a_missing_one_does_not_follow(bench: Bench) -> None:
    bench.submit(3, bench.operation("step"))

    assert not bench.queue.is_followed


async def test_requests_that_do_not_compute_do_not_follow(bench: Bench) -> None:
    bench.submit(2, refusal(InvalidRequest("broken"), "step"))

    assert not bench.queue.is_followed


def pause(bench: Bench) -> None:
    bench.queue.hold()


def attach(bench: Bench) -> None:
    bench.begin(bench.queue.attach)


def publish(bench: Bench) -> None:
    bench.begin(lambda: bench.queue.run_after_accepted(bench.do_nothing))


def have_a_snapshot_due(bench: Bench) -> None:
    bench.queue.log = DueLog()


def use_up_the_tokens(bench: Bench) -> None:
    bench.limits.set(OwnerLimits(owner="me", tokens_per_minute=10))
    bench.limits.spend("me", 20)


def fill_the_results(bench: Bench) -> None:
    bench.results.open("other:train:0:1", b"1", "me")
    bench.results.finish("other:train:0:1", finished({"is": "x" * MAX_RESULT_BYTES}))


@pytest.mark.parametrize(
    "happen",
    [pause, attach, publish, have_a_snapshot_due, use_up_the_tokens, fill_the_results],
)
async def test_a_batch_that_has_to_wait_does_not_follow(
    bench: Bench, happen: Callable[[Bench], None]
) -> None:
    happen(bench)
    await asyncio.sleep(0)
    bench.submit(2, bench.operation("gradient"))

    assert not bench.queue.is_followed


@pytest.mark.parametrize("happen", [use_up_the_tokens, fill_the_results])
async def test_a_step_follows_although_its_owner_may_send_no_batch(
    bench: Bench, happen: Callable[[Bench], None]
) -> None:
    happen(bench)
    bench.submit(2, bench.operation("step"))

    assert bench.queue.is_followed


async def test_a_closed_queue_has_nothing_that_follows(bench: Bench) -> None:
    bench.submit(2, bench.operation("step"))
    bench.queue.close("the model is deleted")

    assert not bench.queue.is_followed
