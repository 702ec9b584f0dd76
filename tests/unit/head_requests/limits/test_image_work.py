"""Decoded images of one owner are bounded, and other requests do not wait for decoding."""

import asyncio
import threading

import pytest

from tinkercloud_protocol.requests.image_files import ImagePart
from tinkercloud_testing.small_models.pictures import picture
from tinkercloud_worker.head.wire.image_work import ImageWork

IMAGE = ImagePart(0, picture(10, 10), "png", None)


async def test_the_images_of_one_owner_wait_until_there_is_room() -> None:
    work = ImageWork(max_pixels=150)
    entered = asyncio.Event()

    async def second() -> None:
        async with work.room("ada", [IMAGE]):
            entered.set()

    async with work.room("ada", [IMAGE]):
        waiting = asyncio.create_task(second())
        async with work.room("bob", [IMAGE]), work.room("ada", []):
            await asyncio.sleep(0)
            assert not entered.is_set()
    await waiting

    assert entered.is_set()


async def test_a_batch_above_the_limit_runs_alone() -> None:
    work = ImageWork(max_pixels=10)

    async with work.room("ada", [IMAGE, IMAGE]):
        pass


async def test_decoding_takes_no_thread_of_other_requests() -> None:
    work = ImageWork()
    release = threading.Event()
    decoding = [asyncio.create_task(work.run(1, release.wait)) for _ in range(100)]
    await asyncio.sleep(0)

    assert await work.run(0, lambda: "text") == "text"
    assert not any(task.done() for task in decoding)

    release.set()
    assert all(await asyncio.gather(*decoding))


async def test_the_error_of_a_job_reaches_its_caller() -> None:
    def fail() -> None:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        await ImageWork().run(1, fail)
