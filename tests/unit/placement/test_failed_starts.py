"""Why the head of a local server has failed to start."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import HeadEndpoint, HeadFailed, HeadReport, ServedModel
from tinkercloud_api.providers.local.head_folder import HeadFolder
from tinkercloud_api.providers.local.local_head import LocalHead, _Killed
from tinkercloud_api.providers.local.local_provider import LocalProvider

UNREACHABLE = HeadEndpoint("http://127.0.0.1:1", "", "g1")
LOGGED = "UserWarning: KeyError: 'rope_scaling' is ignored\nloading\n"


def folder_of(head: LocalHead) -> HeadFolder:
    return HeadFolder(head.unsaved.parent)


async def ignore(_report: HeadReport) -> None: ...


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[LocalHead]:
    async with aiohttp.ClientSession() as client:
        head = LocalHead(ServedModel("m", 8), Settings(state_dir=tmp_path), client, ignore)
        folder_of(head).path.mkdir(parents=True)
        folder_of(head).log.write_text(LOGGED)
        yield head


async def end(head: LocalHead, how: str) -> None:
    """Wait for a process of a head that ends itself."""
    code = f"import os, signal; {how}"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await process.wait()
    await head._wait_until_ready(UNREACHABLE, process)


async def test_the_log_of_a_killed_head_does_not_say_why_it_ended(head: LocalHead) -> None:
    with pytest.raises(_Killed, match="killed by SIGKILL, as the system does if memory is short"):
        await end(head, "os.kill(os.getpid(), signal.SIGKILL)")


async def test_a_reason_that_a_head_has_written_is_reported_even_if_it_was_killed(
    head: LocalHead,
) -> None:
    folder_of(head).reason.write_text("the GPU is lost")

    with pytest.raises(HeadFailed, match="because it exited: the GPU is lost") as raised:
        await end(head, "os.kill(os.getpid(), signal.SIGKILL)")

    assert not isinstance(raised.value, _Killed)


async def test_the_last_error_in_its_log_is_why_a_head_exited(head: LocalHead) -> None:
    with pytest.raises(HeadFailed, match="because it exited: UserWarning: KeyError"):
        await end(head, "os._exit(1)")


async def test_those_who_wait_for_a_model_that_is_removed_get_an_answer(
    head: LocalHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless() -> HeadEndpoint:
        await asyncio.Event().wait()
        return UNREACHABLE

    monkeypatch.setattr(head, "_start", endless)
    waiting = asyncio.create_task(head.acquire())
    await asyncio.sleep(0)
    await head.remove()

    for answer in (waiting, head.acquire()):
        with pytest.raises(HeadFailed, match="base_model 'm' is not served any more"):
            await answer


async def test_a_head_that_could_not_be_stopped_can_be_removed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(state_dir=tmp_path, preload=False)
    provider = LocalProvider([ServedModel("m", 8)], settings)
    await provider.start(ignore)
    stops = []

    async def stop(stopped: LocalHead) -> None:
        stops.append(stopped)
        if len(stops) == 1:
            raise HeadFailed("its lock is damaged")

    monkeypatch.setattr(LocalHead, "stop", stop)

    with pytest.raises(HeadFailed, match="its lock is damaged"):
        await provider.remove_model("m")
    kept = [model.name for model in provider.models()]
    await provider.remove_model("m")
    await provider.stop()

    assert kept == ["m"]
    assert len({*stops}) == 1
    assert len(stops) == 2
    assert provider.models() == []
