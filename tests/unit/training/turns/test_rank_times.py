"""Requests that want to know it learn when ranks ran their commands."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tinkercloud_worker.engine.turns import rank_times
from tinkercloud_worker.engine.turns.engine_thread import EngineThread, NoBackground
from tinkercloud_worker.engine.turns.rank_times import MOST_TIMES, RankTime


@pytest.fixture
async def thread() -> AsyncIterator[EngineThread]:
    def fail(error: BaseException) -> None:
        raise error

    running = EngineThread(fail)
    running.start(NoBackground())
    yield running
    await asyncio.to_thread(running.stop)


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
