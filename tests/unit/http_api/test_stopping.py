"""A server that stops."""

import asyncio
import errno
import os
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import HeadEndpoint, Placement
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_api.serve.hot_paths import HotPaths
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.storage.disks import no_files_over

KEY = "tml-a-valid-key-of-these-tests"


class LoadingHeads(OneHead):
    """A provider whose head is never ready."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = asyncio.Event()

    async def acquire(self, _placement: Placement) -> HeadEndpoint:
        self.is_asked.set()
        return await asyncio.Future()


async def test_a_call_that_a_stopping_server_cancels_is_asked_for_again(tmp_path: Path) -> None:
    settings, heads = Settings(state_dir=tmp_path, bootstrap_key=KEY), LoadingHeads()
    async with running_context(settings, heads) as known:
        asgi = httpx.ASGITransport(app=HotPaths(FastAPI(), lambda: known, []))
        async with httpx.AsyncClient(transport=asgi, base_url="http://t") as client:
            call = client.post(
                routes.OPENAI_CHAT,
                headers={routes.API_KEY_HEADER: KEY},
                json={"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
            )
            waiting = asyncio.create_task(call)
            await heads.is_asked.wait()
            known.long_polls.shut_down()
            await asyncio.sleep(0)
            waiting.cancel()
            answer = await waiting

    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the server is stopping; send the request again"


class UnsavingHeads(OneHead):
    """A provider whose heads can't be stopped properly."""

    async def stop(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_server_stops_on_a_full_disk_without_an_error(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, bootstrap_key=KEY)

    with ExitStack() as until_it_has_stopped:
        async with running_context(settings, UnsavingHeads()) as known:
            (key,) = await known.catalog.keys()
            known.activity.use_key(key.id)
            # The catalog is longer, and what pytest captures is not.
            until_it_has_stopped.enter_context(no_files_over(16 << 10))
            with pytest.raises(Unavailable):
                await known.activity.write()
