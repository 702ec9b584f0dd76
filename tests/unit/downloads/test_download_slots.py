"""The downloads of one owner leave room for those of others."""

import asyncio

import pytest

from tinkercloud_api.transfers.slots import DownloadSlots
from tinkercloud_protocol.wire.errors import Overloaded


async def test_an_owners_further_downloads_wait_and_those_of_others_start() -> None:
    slots, started = DownloadSlots(per_owner=2), list[str]()
    finish, bobs_started = asyncio.Event(), asyncio.Event()

    async def download(owner: str) -> None:
        async with slots.hold(owner):
            started.append(owner)
            if owner == "bob":
                bobs_started.set()
            await finish.wait()

    async with asyncio.TaskGroup() as downloads:
        for owner in ("alice",) * 5 + ("bob",):
            downloads.create_task(download(owner))
        await bobs_started.wait()

        assert started == ["alice", "alice", "bob"]
        finish.set()

    assert sorted(started) == ["alice"] * 5 + ["bob"]


async def test_a_download_that_waited_too_long_is_refused_and_frees_its_place() -> None:
    slots = DownloadSlots(per_owner=1, wait_seconds=0.01)

    for _ in range(3):
        async with slots.hold("alice"):
            with pytest.raises(Overloaded, match="'alice' already downloads 1 files"):
                async with slots.hold("alice"):
                    pass


async def test_the_number_of_waiting_downloads_is_bounded() -> None:
    slots = DownloadSlots(per_owner=1)

    async def download() -> None:
        async with slots.hold("alice"):
            pass

    async with slots.hold("alice"), asyncio.TaskGroup() as waiting:
        tasks = [waiting.create_task(download()) for _ in range(16)]
        await asyncio.sleep(0)

        with pytest.raises(Overloaded):
            await download()

        tasks[0].cancel()
        await asyncio.sleep(0)
        tasks.append(waiting.create_task(download()))
        await asyncio.sleep(0)
        for task in tasks:
            assert not task.done() or task.cancelled()
            task.cancel()
