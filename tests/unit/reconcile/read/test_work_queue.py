"""The work queue: each name once, and never with two workers."""

import asyncio

import pytest

from tinkercloud_operator.run.cluster.work_queue import WorkQueue

SOON, LATER = 0.01, 30.0


async def taken_from(queue: WorkQueue) -> str:
    return await asyncio.wait_for(queue.take(), timeout=5)


async def is_empty(queue: WorkQueue) -> bool:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.take(), timeout=0.05)
    return True


async def test_a_name_added_twice_is_taken_once() -> None:
    queue = WorkQueue()
    queue.add("a")
    queue.add("a")
    queue.add("b")

    assert len(queue) == 2
    assert [await taken_from(queue), await taken_from(queue)] == ["a", "b"]
    assert await is_empty(queue)


async def test_a_name_in_progress_is_taken_again_only_afterwards() -> None:
    queue = WorkQueue()
    queue.add("a")
    name = await taken_from(queue)

    queue.add("a")
    assert await is_empty(queue)
    queue.done(name)

    assert await taken_from(queue) == "a"


async def test_a_processed_name_does_not_return() -> None:
    queue = WorkQueue()
    queue.add("a")

    queue.done(await taken_from(queue))

    assert await is_empty(queue)


async def test_a_failed_name_is_retried() -> None:
    queue = WorkQueue()
    queue.add("a")

    queue.failed(await taken_from(queue))

    assert len(queue) == 0
    assert await taken_from(queue) == "a"


async def test_the_earlier_of_two_delays_wins() -> None:
    queue = WorkQueue()
    queue.add_after("a", LATER)
    queue.add_after("a", SOON)
    queue.add_after("b", SOON)
    queue.add_after("b", LATER)

    assert {await taken_from(queue), await taken_from(queue)} == {"a", "b"}


async def test_adding_a_name_cancels_its_delay() -> None:
    queue = WorkQueue()
    queue.add_after("a", SOON)
    queue.add("a")

    queue.done(await taken_from(queue))

    assert await is_empty(queue)
