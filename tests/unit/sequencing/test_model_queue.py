"""The queue of one model: order, gaps, and steps that fail in part."""

import asyncio
from collections.abc import AsyncIterator, Callable

import orjson
import pytest

from tinkercloud_protocol.heads.launch import Timings
from tinkercloud_protocol.wire.errors import InvalidRequest, Overloaded, Unavailable, WireError
from tinkercloud_protocol.wire.future_responses import Result, finished
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_worker.head.order.kept_results import Results
from tinkercloud_worker.head.order.queue import ModelQueue
from tinkercloud_worker.head.order.queued_request import Operation, Role, refusal
from tinkercloud_worker.head.order.sequencer import MAX_AHEAD

MODEL = ModelId("s", 0)
MAX_QUEUED_BYTES = 1 << 20


class Bench:
    """A queue that records which requests ran."""

    def __init__(self, gap_seconds: float = 60) -> None:
        self.results = Results(Timings(), 1 << 20, now=lambda: 0.0)
        self.ran: list[str] = []
        self.can_drop = True
        self.queue = ModelQueue(
            MODEL,
            self.results,
            owner="me",
            max_queued_bytes=MAX_QUEUED_BYTES,
            gap_seconds=gap_seconds,
            drop_gradient=self.drop_gradient,
        )
        self.queue.sequencer.next_seq_id = 1

    async def drop_gradient(self) -> None:
        if not self.can_drop:
            raise RuntimeError("no engine is there")
        self.ran.append("drop")

    def submit(
        self,
        seq_id: int,
        role: Role = "other",
        work: Callable[[], None] | None = None,
        size: int = 1,
    ) -> str:
        async def run() -> Result:
            await asyncio.sleep(0)
            if work is not None:
                work()
            self.ran.append(f"{role} {seq_id}")
            return finished({"seq_id": seq_id})

        return self.queue.submit(seq_id, b"%d" % seq_id, size, Operation(run, role))

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


async def test_a_gradient_that_could_not_be_dropped_is_dropped_before_the_next_batch(
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


async def test_the_time_of_the_last_progress_is_that_of_a_request_that_arrived_or_finished(
    bench: Bench,
) -> None:
    created = bench.queue.moved_at
    bench.submit(2)
    arrived = bench.queue.moved_at
    bench.submit(3)
    waits = bench.queue.moved_at
    bench.submit(1)
    await bench.queue.idle()

    assert created < arrived == waits < bench.queue.moved_at


async def test_a_repeated_request_runs_once_and_has_one_id(bench: Bench) -> None:
    ids = {bench.submit(1) for _ in range(3)}

    await bench.answer(1)

    assert len(ids) == 1
    assert bench.ran == ["other 1"]


async def test_details_of_unexpected_errors_are_not_exposed(bench: Bench) -> None:
    def fail() -> None:
        raise ZeroDivisionError("secret")

    bench.submit(1, work=fail)
    bench.submit(2)

    assert (await bench.answer(1))["category"] == "server"
    assert "secret" not in str(await bench.answer(1))
    assert await bench.answer(2) == {"seq_id": 2}


async def test_a_step_with_a_failed_batch_is_dropped_completely(bench: Bench) -> None:
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


async def test_a_client_that_has_read_the_failure_can_restart_the_step(bench: Bench) -> None:
    bench.submit_broken(1)
    await bench.answer(1)

    bench.submit(2, "gradient")
    bench.submit(3, "step")

    assert await bench.answer(3) == {"seq_id": 3}
    assert bench.ran == ["drop", "gradient 2", "step 3"]


async def test_a_failed_step_does_not_affect_other_requests(bench: Bench) -> None:
    bench.submit_broken(1)
    bench.submit(2, "other")

    assert await bench.answer(2) == {"seq_id": 2}


async def test_waiting_for_a_missing_number_times_out() -> None:
    bench = Bench(gap_seconds=0.05)
    bench.submit(2, "gradient")
    bench.submit(3, "step")

    dropped = [await bench.answer(2), await bench.answer(3)]
    bench.submit(4, "gradient")
    bench.submit(5, "step")

    assert all("seq_id 1 did not arrive" in str(answer["error"]) for answer in dropped)
    assert await bench.answer(5) == {"seq_id": 5}
    bench.queue.close("the test is over")


@pytest.mark.parametrize("behind", [("gradient", "step"), ("step",), ("other",)], ids=str)
async def test_batches_before_a_missing_number_are_never_applied_without_it(
    behind: tuple[Role, ...],
) -> None:
    bench = Bench(gap_seconds=0.05)
    bench.submit(1, "gradient")
    await bench.answer(1)
    last = 2
    for last, role in enumerate(behind, start=3):
        bench.submit(last, role)
    assert "seq_id 2 did not arrive" in str((await bench.answer(last))["error"])

    bench.submit(last + 1, "step")
    bench.submit(last + 2, "gradient")
    bench.submit(last + 3, "step")

    assert "the gradient was dropped" in str((await bench.answer(last + 1))["error"])
    assert await bench.answer(last + 3) == {"seq_id": last + 3}
    assert bench.ran == ["gradient 1", "drop", f"gradient {last + 2}", f"step {last + 3}"]
    bench.queue.close("the test is over")


async def test_the_snapshot_of_a_paused_queue_reports_a_dirty_gradient() -> None:
    bench = Bench(gap_seconds=0.05)
    bench.submit(1, "gradient")
    bench.submit(3, "gradient")
    await bench.answer(3)
    await bench.queue.pause()

    assert bench.queue.snapshot().has_dirty_gradient
    bench.queue.close("the test is over")


async def test_a_chunk_of_a_too_large_call_fails_instead_of_being_retried_forever(
    bench: Bench,
) -> None:
    bench.submit(2, "gradient", size=MAX_QUEUED_BYTES)
    bench.submit(3, "gradient")
    bench.submit(1, "gradient")

    assert await bench.answer(2) == {"seq_id": 2}
    assert "in several calls before optim_step" in str((await bench.answer(3))["error"])
    bench.submit(4, "step")
    assert "not applied: request s:train:0:3" in str((await bench.answer(4))["error"])
    assert bench.ran == ["gradient 1", "gradient 2", "drop"]


async def test_an_overloaded_queue_asks_for_a_retry_while_a_request_runs(bench: Bench) -> None:
    bench.submit(1)
    bench.submit(2, size=MAX_QUEUED_BYTES - 1)

    with pytest.raises(Overloaded, match="wait for some results"):
        bench.submit(3)

    await bench.answer(2)
    bench.submit(3)
    assert await bench.answer(3) == {"seq_id": 3}


async def test_a_missing_number_that_arrives_in_time_ends_the_wait() -> None:
    bench = Bench(gap_seconds=0.2)
    bench.submit(2)
    await asyncio.sleep(0.1)
    bench.submit(1)
    await bench.answer(2)
    await asyncio.sleep(0.2)
    bench.submit(3)

    assert await bench.answer(3) == {"seq_id": 3}
    bench.queue.close("the test is over")


async def test_a_missing_number_that_arrives_in_time_may_run_for_longer_than_the_wait() -> None:
    bench = Bench(gap_seconds=0.2)
    bench.submit(2)
    await bench.queue.idle()

    async def run() -> Result:
        await asyncio.sleep(0.4)
        return finished({"seq_id": 1})

    bench.queue.submit(1, b"1", 1, Operation(run))

    assert await bench.answer(1) == {"seq_id": 1}
    assert await bench.answer(2) == {"seq_id": 2}
    bench.queue.close("the test is over")


async def test_a_missing_number_that_arrives_in_time_may_wait_for_work_between_requests() -> None:
    bench = Bench(gap_seconds=0.2)
    bench.submit(2)
    await bench.queue.idle()
    work = asyncio.create_task(bench.queue.run_after_accepted(lambda: asyncio.sleep(0.4)))
    await asyncio.sleep(0.05)
    bench.submit(1)
    await work

    assert await bench.answer(2) == {"seq_id": 2}
    bench.queue.close("the test is over")


async def test_requests_behind_a_missing_number_do_not_prolong_the_wait() -> None:
    bench = Bench(gap_seconds=0.3)
    bench.submit(2)
    for seq_id in range(3, 12):
        await asyncio.sleep(0.05)
        bench.submit(seq_id)

    assert f"{MODEL}:2" not in bench.results.unfinished()
    bench.queue.close("the test is over")


async def test_an_optim_step_that_fails_on_the_server_drops_the_gradient(
    bench: Bench,
) -> None:
    def fail() -> None:
        raise Unavailable("the engine is away")

    bench.submit(1, "gradient")
    bench.submit(2, "step", fail)
    failed = await bench.answer(2)
    bench.submit(3, "gradient")
    bench.submit(4, "step")
    await bench.answer(4)

    assert "send the step's data again" in str(failed["error"])
    assert bench.ran == ["gradient 1", "drop", "gradient 3", "step 4"]


@pytest.mark.parametrize(
    "error", [InvalidRequest("learning_rate: -1"), Overloaded("no memory for the model")]
)
async def test_an_optim_step_that_never_began_can_be_retried_alone(
    bench: Bench, error: WireError
) -> None:
    bench.submit(1, "gradient")
    bench.queue.submit(2, b"2", 1, refusal(error, "step"))
    bench.submit(3, "step")

    assert await bench.answer(3) == {"seq_id": 3}
    assert bench.ran == ["gradient 1", "step 3"]


async def test_pausing_a_closed_queue_returns_immediately(bench: Bench) -> None:
    never = asyncio.Event()

    async def hang() -> Result:
        await never.wait()
        return finished({})

    bench.queue.submit(1, b"1", 1, Operation(hang))
    await asyncio.sleep(0)
    pausing = asyncio.create_task(bench.queue.pause())
    await asyncio.sleep(0)
    bench.queue.close("the model was deleted")

    await asyncio.wait_for(pausing, timeout=5)


async def test_background_work_does_not_block_the_next_request(
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


async def test_closing_a_queue_fails_all_waiting_requests(bench: Bench) -> None:
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


async def test_a_client_that_attaches_continues_behind_everything_that_was_sent(
    bench: Bench,
) -> None:
    bench.submit(1, "gradient")
    await bench.answer(1)
    bench.submit(3, "step")

    next_seq_id = await bench.queue.attach()

    assert next_seq_id == 4 + MAX_AHEAD + 1
    assert "another client has attached" in str((await bench.answer(3))["error"])
    bench.submit(next_seq_id, "load")
    bench.submit(next_seq_id + 1, "gradient")
    assert await bench.answer(next_seq_id + 1) == {"seq_id": next_seq_id + 1}
    assert bench.ran == ["gradient 1", f"load {next_seq_id}", f"gradient {next_seq_id + 1}"]


async def test_a_client_that_slept_while_another_attached_is_refused(bench: Bench) -> None:
    bench.submit(1, "gradient")
    await bench.answer(1)

    next_seq_id = await bench.queue.attach()

    for seq_id in (2, 1 + MAX_AHEAD):
        with pytest.raises(InvalidRequest, match="another process has continued this model"):
            bench.submit(seq_id, "gradient")
    bench.submit(next_seq_id, "gradient")
    assert await bench.answer(next_seq_id) == {"seq_id": next_seq_id}
    assert await bench.queue.attach() > next_seq_id + MAX_AHEAD


async def test_attaching_waits_for_the_running_request_and_drops_the_gradient(
    bench: Bench,
) -> None:
    bench.submit(1, "gradient")
    bench.submit(2, "gradient")
    await asyncio.sleep(0)

    next_seq_id = await bench.queue.attach()
    bench.submit(next_seq_id, "gradient")
    await bench.answer(next_seq_id)

    assert bench.ran[0] == "gradient 1"
    assert bench.ran[-2:] == ["drop", f"gradient {next_seq_id}"]
