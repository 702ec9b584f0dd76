"""Work without a number runs between the requests of a model, in order of arrival."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tinkercloud_protocol.heads.launch import Timings
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_protocol.wire.future_responses import Result, finished
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_worker.head.order.kept_results import Results
from tinkercloud_worker.head.order.queue import ModelQueue
from tinkercloud_worker.head.order.queued_request import Operation


class Bench:
    """A queue that records what ran."""

    def __init__(self) -> None:
        self.results = Results(Timings(), 1 << 20, now=lambda: 0.0)
        self.ran: list[str] = []
        self.queue = ModelQueue(
            ModelId("s", 0),
            self.results,
            owner="me",
            max_queued_bytes=1 << 20,
            gap_seconds=60,
            drop_gradient=self.do_nothing,
        )
        self.queue.sequencer.next_seq_id = 1

    async def do_nothing(self) -> None: ...

    def submit(self, seq_id: int) -> None:
        async def run() -> Result:
            await asyncio.sleep(0)
            self.ran.append(str(seq_id))
            return finished({})

        self.queue.submit(seq_id, b"%d" % seq_id, 1, Operation(run))

    def work(self, name: str) -> "asyncio.Task[str]":
        async def run() -> str:
            await asyncio.sleep(0)
            self.ran.append(name)
            return name

        return asyncio.create_task(self.queue.run_after_accepted(run))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.queue.close("the test is over")


async def test_work_runs_after_earlier_and_before_later_requests(bench: Bench) -> None:
    bench.submit(1)
    first = bench.work("a")
    await asyncio.sleep(0)
    bench.submit(2)
    second = bench.work("b")

    assert [await first, await second] == ["a", "b"]
    assert bench.ran == ["1", "a", "2", "b"]


async def test_work_does_not_wait_for_requests_behind_a_missing_one(bench: Bench) -> None:
    bench.submit(1)
    bench.submit(3)

    await bench.work("a")
    bench.submit(2)
    await bench.results.wait("s:train:0:3", seconds=5)

    assert bench.ran == ["1", "a", "2", "3"]


async def test_an_exception_of_the_work_is_its_callers(bench: Bench) -> None:
    async def fail() -> None:
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        await bench.queue.run_after_accepted(fail)
    assert await bench.work("a") == "a"


async def test_work_that_is_not_awaited_any_more_does_not_run(bench: Bench) -> None:
    bench.submit(1)
    dropped = bench.work("dropped")
    await asyncio.sleep(0)
    dropped.cancel()

    await bench.work("a")

    assert bench.ran == ["1", "a"]


async def test_a_closed_queue_ends_the_wait(bench: Bench) -> None:
    running, waiting = asyncio.Event(), asyncio.Event()

    async def block() -> None:
        running.set()
        await waiting.wait()

    tasks = [asyncio.create_task(bench.queue.run_after_accepted(block)), bench.work("a")]
    await running.wait()

    bench.queue.close("the model was deleted")

    for task in tasks:
        with pytest.raises(Unavailable, match="the model was deleted"):
            await task
    assert bench.ran == []


async def test_a_paused_queue_runs_work_whose_turn_it_is(bench: Bench) -> None:
    await bench.queue.pause()
    bench.submit(1)
    late = bench.work("late")
    await asyncio.sleep(0)

    assert not late.done()
    bench.queue.unpause()
    await late
    assert bench.ran == ["1", "late"]
