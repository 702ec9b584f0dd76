"""The queue of one model: order, gaps, and steps that fail in part."""

import asyncio
from collections.abc import AsyncIterator, Callable

import orjson
import pytest

from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.futures import Result, finished
from tinkercloud_protocol.ids import ModelId
from tinkercloud_protocol.launch import Timings
from tinkercloud_worker.head.queue import ModelQueue, Operation, Role, refusal
from tinkercloud_worker.head.results import Results

MODEL = ModelId("s", 0)


class Bench:
    """A queue over a list of what ran."""

    def __init__(self, gap_seconds: float = 60) -> None:
        self.results = Results(Timings(), 1 << 20, now=lambda: 0.0)
        self.ran: list[str] = []
        self.can_drop = True
        self.queue = ModelQueue(
            MODEL,
            self.results,
            max_queued_bytes=1 << 20,
            gap_seconds=gap_seconds,
            drop_gradient=self.drop_gradient,
        )
        self.queue.sequencer.next_seq_id = 1

    async def drop_gradient(self) -> None:
        if not self.can_drop:
            raise RuntimeError("no engine is there")
        self.ran.append("drop")

    def submit(
        self, seq_id: int, role: Role = "other", work: Callable[[], None] | None = None
    ) -> str:
        async def run() -> Result:
            await asyncio.sleep(0)
            if work is not None:
                work()
            self.ran.append(f"{role} {seq_id}")
            return finished({"seq_id": seq_id})

        return self.queue.submit(seq_id, b"%d" % seq_id, 1, Operation(run, role))

    def submit_broken(self, seq_id: int) -> str:
        broken = refusal(InvalidRequest("broken batch"), "gradient")
        return self.queue.submit(seq_id, b"%d" % seq_id, 1, broken)

    async def answer(self, seq_id: int) -> dict[str, object]:
        result = await self.results.wait(f"{MODEL}:{seq_id}", seconds=5)
        assert result is not None
        answer: dict[str, object] = orjson.loads(result.body)
        return answer


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.queue.close("the test is over")


async def test_a_gradient_that_can_not_be_dropped_now_is_dropped_before_anything_is_added(
    bench: Bench,
) -> None:
    bench.can_drop = False
    bench.submit_broken(1)
    assert "broken batch" in str((await bench.answer(1))["error"])
    bench.submit(2, "gradient")
    assert "no engine is there" not in str(await bench.answer(2))
    bench.can_drop = True
    bench.submit(3, "gradient")
    bench.submit(4, "step")
    await bench.answer(4)

    assert bench.ran[:2] == ["drop", "gradient 3"]


async def test_requests_run_in_order_of_their_numbers(bench: Bench) -> None:
    for seq_id in (3, 2, 4, 1):
        bench.submit(seq_id)

    await bench.answer(4)

    assert bench.ran == ["other 1", "other 2", "other 3", "other 4"]


async def test_a_repeated_request_runs_once_and_has_one_id(bench: Bench) -> None:
    ids = {bench.submit(1) for _ in range(3)}

    await bench.answer(1)

    assert len(ids) == 1
    assert bench.ran == ["other 1"]


async def test_an_unexpected_error_is_answered_without_its_details(bench: Bench) -> None:
    def fail() -> None:
        raise ZeroDivisionError("secret")

    bench.submit(1, work=fail)
    bench.submit(2)

    assert (await bench.answer(1))["category"] == "server"
    assert "secret" not in str(await bench.answer(1))
    assert await bench.answer(2) == {"seq_id": 2}


async def test_a_step_whose_batch_failed_in_part_is_dropped_whole(bench: Bench) -> None:
    bench.submit(1, "gradient")
    bench.submit_broken(2)
    bench.submit(3, "gradient")
    bench.submit(4, "step")
    bench.submit(5, "gradient")
    bench.submit(6, "step")

    answers = [await bench.answer(seq_id) for seq_id in range(1, 7)]

    assert bench.ran == ["gradient 1", "drop", "drop", "gradient 5", "step 6"]
    assert "broken batch" in str(answers[1]["error"])
    assert "not run" in str(answers[2]["error"])
    assert "not applied" in str(answers[3]["error"])
    assert answers[5] == {"seq_id": 6}


async def test_a_client_that_has_seen_the_failure_may_begin_the_step_again(bench: Bench) -> None:
    bench.submit_broken(1)
    await bench.answer(1)

    bench.submit(2, "gradient")
    bench.submit(3, "step")

    assert await bench.answer(3) == {"seq_id": 3}
    assert bench.ran == ["drop", "gradient 2", "step 3"]


async def test_other_requests_are_not_touched_by_a_failed_step(bench: Bench) -> None:
    bench.submit_broken(1)
    bench.submit(2, "other")

    assert await bench.answer(2) == {"seq_id": 2}


async def test_a_missing_number_is_not_waited_for_for_ever() -> None:
    bench = Bench(gap_seconds=0.05)
    bench.submit(2, "gradient")
    bench.submit(3, "step")

    dropped = [await bench.answer(2), await bench.answer(3)]
    bench.submit(4, "gradient")
    bench.submit(5, "step")

    assert all("seq_id 1 did not arrive" in str(answer["error"]) for answer in dropped)
    assert await bench.answer(5) == {"seq_id": 5}
    bench.queue.close("the test is over")


async def test_a_number_that_comes_in_time_ends_the_wait() -> None:
    bench = Bench(gap_seconds=0.2)
    bench.submit(2)
    await asyncio.sleep(0.1)
    bench.submit(1)
    await bench.answer(2)
    await asyncio.sleep(0.2)
    bench.submit(3)

    assert await bench.answer(3) == {"seq_id": 3}
    bench.queue.close("the test is over")


async def test_work_that_goes_on_in_the_background_does_not_hold_up_the_next(
    bench: Bench,
) -> None:
    release = asyncio.Event()

    async def upload() -> Result:
        await release.wait()
        return finished({"seq_id": 1})

    async def begin() -> asyncio.Future[Result]:
        return asyncio.ensure_future(upload())

    bench.queue.submit(1, b"1", 1, Operation(begin))
    bench.submit(2)

    assert await bench.answer(2) == {"seq_id": 2}
    release.set()
    assert await bench.answer(1) == {"seq_id": 1}


async def test_closing_answers_everyone_who_waits(bench: Bench) -> None:
    never = asyncio.Event()

    async def hang() -> Result:
        await never.wait()
        return finished({})

    bench.queue.submit(1, b"1", 1, Operation(hang))
    bench.submit(2)
    await asyncio.sleep(0)
    bench.queue.close("the head stopped")

    assert "the head stopped" in str((await bench.answer(1))["error"])
    assert "the head stopped" in str((await bench.answer(2))["error"])
