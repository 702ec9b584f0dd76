"""The engine thread: the order of jobs, and jobs that run as one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from tinkercloud_worker.engine.thread import EngineThread, NoBackground


class Sums:
    """Answers numbers with the sum of those they ran with, and lets at most three run at once."""

    def __init__(self) -> None:
        self.ran: list[list[int]] = []

    def can_batch(self, items: Sequence[int], _item: int) -> bool:
        return len(items) < 3

    def run_batch(self, items: Sequence[int], _between: Callable[[], None]) -> list[int]:
        self.ran.append(list(items))
        if -1 in items:
            raise ValueError("-1")
        return [10 * item + sum(items) for item in items]


@pytest.fixture
async def thread() -> AsyncIterator[EngineThread]:
    thread = EngineThread(on_crash=lambda error: pytest.fail(repr(error)))
    thread.start(NoBackground())
    yield thread
    thread.stop()


async def while_busy(
    thread: EngineThread, *submitted: Callable[[], asyncio.Task[Any]]
) -> list[Any]:
    """Submit work while a job runs; return its results once that job may end."""
    may_end = threading.Event()
    busy = asyncio.create_task(thread.run(lambda _: may_end.wait()))
    await asyncio.sleep(0)
    tasks = [submit() for submit in submitted]
    await asyncio.sleep(0)
    may_end.set()
    await busy
    return await asyncio.gather(*tasks, return_exceptions=True)


def item(thread: EngineThread, group: Sums, number: int) -> Callable[[], asyncio.Task[int]]:
    return lambda: asyncio.create_task(thread.run_batched(group, number))


async def test_items_of_a_group_that_wait_run_as_one_and_each_gets_its_own_result(
    thread: EngineThread,
) -> None:
    group = Sums()

    results = await while_busy(thread, *[item(thread, group, n) for n in (1, 2, 3)])

    assert group.ran == [[1, 2, 3]]
    assert results == [16, 26, 36]


async def test_items_that_do_not_join_wait_for_the_next_turn(thread: EngineThread) -> None:
    group = Sums()

    await while_busy(thread, *[item(thread, group, n) for n in (1, 2, 3, 4, 5)])

    assert group.ran == [[1, 2, 3], [4, 5]]


async def test_groups_keep_apart_and_other_jobs_keep_their_turn(thread: EngineThread) -> None:
    one, other = Sums(), Sums()
    order: list[str] = []
    job = lambda: asyncio.create_task(thread.run(lambda _: order.append(f"{one.ran}{other.ran}")))  # noqa: E731 - as `item`

    await while_busy(
        thread, item(thread, one, 1), job, item(thread, other, 5), item(thread, one, 2)
    )

    assert (one.ran, other.ran) == ([[1, 2]], [[5]])
    assert order == ["[[1, 2]][]"]


async def test_an_error_is_raised_only_for_the_items_that_ran_together(
    thread: EngineThread,
) -> None:
    group = Sums()

    results = await while_busy(thread, *[item(thread, group, n) for n in (1, -1, 3, 4)])

    assert [type(result) for result in results] == [ValueError, ValueError, ValueError, int]
