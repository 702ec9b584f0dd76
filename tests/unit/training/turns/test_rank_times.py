"""Requests that want to know it learn when ranks ran their commands."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence

import pytest

from tinkercloud_worker.engine.turns import rank_times
from tinkercloud_worker.engine.turns.engine_thread import (
    EngineThread,
    NoBackground,
    PieceLimit,
    Tokens,
)
from tinkercloud_worker.engine.turns.fair_queue import Share
from tinkercloud_worker.engine.turns.rank_times import MOST_TIMES, RankTime


class Sampler:
    """A background task that runs a command in each of its steps."""

    def __init__(self) -> None:
        self.steps_left = 0

    def has_work(self) -> bool:
        return self.steps_left > 0

    def step(self) -> Tokens:
        self.steps_left -= 1
        run("sample", (1, 2))
        return {}


class Passes:
    """Runs requests, two at a time, with a background step between two commands."""

    def __init__(self, background: Sampler) -> None:
        self._background = background

    def can_batch(self, items: Sequence[str], _item: str) -> bool:
        return len(items) < 2

    def run_batch(self, items: Sequence[str], between: Callable[[], None]) -> list[str]:
        run("first", (1, 2))
        self._background.steps_left = 1
        between()
        run("second", (3, 4))
        return list(items)

    def pieces(self, item: str, _limit: PieceLimit) -> Generator[int, None, str]:
        yield from ()
        return item


@pytest.fixture
async def thread() -> AsyncIterator[EngineThread]:
    running = a_thread()
    running.start(NoBackground())
    yield running
    await asyncio.to_thread(running.stop)


def a_thread() -> EngineThread:
    def fail(error: BaseException) -> None:
        raise error

    return EngineThread(fail)


def run(command: str, *times: tuple[float, float]) -> None:
    """Do what a group does when its ranks have run a command."""
    rank_times.note(command, times)


async def test_a_request_gets_the_times_of_rank_0_and_of_the_slowest_of_its_own_commands(
    thread: EngineThread,
) -> None:
    async def request(command: str) -> rank_times.RankTimes:
        times = rank_times.collect()
        await thread.run(lambda _: run(command, (1, 3), (1, 2), (1, 9)))
        return times

    one, two = await asyncio.gather(request("forward_backward"), request("optim_step"))

    assert one == [RankTime("forward_backward", 0, 1, 3), RankTime("forward_backward", 2, 1, 9)]
    assert {each.command for each in two} == {"optim_step"}


async def test_rank_0_has_one_time_if_it_is_the_slowest(thread: EngineThread) -> None:
    times = rank_times.collect()

    await thread.run(lambda _: run("forward", (1, 9), (1, 2)))

    assert times == [RankTime("forward", 0, 1, 9)]


async def test_requests_that_share_a_pass_get_its_times_each() -> None:
    one, two = rank_times.RankTimes(), rank_times.RankTimes()

    with rank_times.serving([one, None, two]):
        run("shared_pass", (1, 2))
    run("of nobody", (3, 4))

    assert one == two == [RankTime("shared_pass", 0, 1, 2)]


async def test_a_background_step_within_a_shared_pass_is_none_of_its_requests() -> None:
    thread, sampler = a_thread(), Sampler()
    passes = Passes(sampler)

    async def request(model: str) -> rank_times.RankTimes:
        times = rank_times.collect()
        await thread.run_batched(passes, model, Share("me", model, tokens=1))
        return times

    requests = [asyncio.create_task(request(model)) for model in ("one", "two")]
    # Both wait when the thread starts, so that they share a pass.
    await asyncio.sleep(0)
    thread.start(sampler)
    found = await asyncio.gather(*requests)
    await asyncio.to_thread(thread.stop)

    assert [[each.command for each in times] for times in found] == [["first", "second"]] * 2
    assert sampler.steps_left == 0


async def test_a_request_that_wants_no_times_adds_none_to_those_of_an_earlier_one(
    thread: EngineThread,
) -> None:
    times = rank_times.collect()
    rank_times.stop()

    await thread.run(lambda _: run("forward", (1, 2)))

    assert times == []


def test_a_batch_in_many_pieces_has_a_bounded_number_of_times() -> None:
    times = rank_times.RankTimes()

    with rank_times.serving([times]):
        for _ in range(MOST_TIMES):
            run("forward_backward", (1, 2), (1, 3))

    assert len(times) == MOST_TIMES
