"""A provider whose start fails ends what it started: nobody else would."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import HeadReport, ServedModel
from tinkercloud_api.providers.cluster.kubernetes_provider import KubernetesProvider
from tinkercloud_api.providers.local import local_provider
from tinkercloud_api.providers.local.local_head import LocalHead
from tinkercloud_api.providers.local.local_provider import LocalProvider


async def ignore(_report: HeadReport) -> None: ...


async def test_heads_that_were_started_before_one_fails_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[aiohttp.ClientSession] = []

    def open_client() -> aiohttp.ClientSession:
        opened.append(aiohttp.ClientSession())
        return opened[-1]

    async def adopt(head: LocalHead) -> None:
        if head.unsaved.parent != first:
            raise OSError("full disk")

    async def load(_head: LocalHead) -> None:
        await asyncio.Event().wait()

    settings = Settings(state_dir=tmp_path, preload=True)
    async with aiohttp.ClientSession() as client:
        first = LocalHead(ServedModel("a", 8), settings, client, ignore).unsaved.parent
    monkeypatch.setattr(local_provider, "open_client", open_client)
    monkeypatch.setattr(LocalHead, "adopt", adopt)
    monkeypatch.setattr(LocalHead, "_start", load)
    before = asyncio.all_tasks()

    with pytest.raises(OSError, match="full disk"):
        await LocalProvider([ServedModel(name, 8) for name in "ab"], settings).start(ignore)

    assert [client.closed for client in opened] == [True]
    assert asyncio.all_tasks() == before


async def test_a_server_that_is_stopped_while_it_waits_for_kubernetes_watches_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"name": "a", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "a", "context": {"cluster": "a", "user": "a"}}
    user = {"name": "a", "user": {"token": "t"}}
    config = {"clusters": [cluster], "contexts": [context], "users": [user]}
    (tmp_path / "config").write_text(json.dumps({**config, "current-context": "a"}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    before = asyncio.all_tasks()

    starting = asyncio.create_task(KubernetesProvider("default", None).start(ignore))
    while len(asyncio.all_tasks()) < len(before) + 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    starting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await starting
    assert asyncio.all_tasks() == before
