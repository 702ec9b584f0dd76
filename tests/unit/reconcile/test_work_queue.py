"""The queue of sessions to look at: each once, never two workers at one session."""

import asyncio

import pytest

from tinkercloud_operator.run.work_queue import WorkQueue

SOON, LATER = 0.01, 30.0


async def next_of(queue: WorkQueue) -> str:
    return await asyncio.wait_for(queue.take(), timeout=5)


async def nobody_is_next(queue: WorkQueue) -> bool:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take(), timeout=0.05)
    return True


async def test_a_name_that_is_added_twice_is_handed_out_once() -> None:
    queue = WorkQueue()
    queue.add("a")
    queue.add("a")
    queue.add("b")

    assert len(queue) == 2
    assert [await next_of(queue), await next_of(queue)] == ["a", "b"]
    assert await nobody_is_next(queue)


async def test_a_name_that_is_looked_at_is_handed_out_again_only_afterwards() -> None:
    queue = WorkQueue()
    queue.add("a")
    name = await next_of(queue)

    queue.add("a")
    assert await nobody_is_next(queue)
    queue.done(name)

    assert await next_of(queue) == "a"


async def test_a_name_that_was_dealt_with_does_not_come_back() -> None:
    queue = WorkQueue()
    queue.add("a")

    queue.done(await next_of(queue))

    assert await nobody_is_next(queue)


async def test_a_name_whose_look_failed_comes_back_by_itself() -> None:
    queue = WorkQueue()
    queue.add("a")

    queue.failed(await next_of(queue))

    assert len(queue) == 0
    assert await next_of(queue) == "a"


async def test_of_two_times_the_earlier_counts() -> None:
    queue = WorkQueue()
    queue.add_after("a", LATER)
    queue.add_after("a", SOON)
    queue.add_after("b", SOON)
    queue.add_after("b", LATER)

    assert {await next_of(queue), await next_of(queue)} == {"a", "b"}


async def test_a_name_that_is_added_does_not_come_again_when_its_time_has_come() -> None:
    queue = WorkQueue()
    queue.add_after("a", SOON)
    queue.add("a")

    queue.done(await next_of(queue))

    assert await nobody_is_next(queue)
