"""What a local server says of a head that loads, has failed or stops."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import (
    HeadEndpoint,
    HeadFailed,
    HeadReport,
    Placement,
    ServedModel,
)
from tinkercloud_api.providers.local import local_head
from tinkercloud_api.providers.local.local_head import LocalHead
from tinkercloud_api.providers.local.local_provider import LocalProvider
from tinkercloud_api.providers.session_options import SessionOptions
from tinkercloud_protocol.heads.launch import HEAD_PROTOCOL, HeadStatus
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.bare_heads import until

MODEL = ServedModel("m", 8)


async def ignore(_report: HeadReport) -> None: ...


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider([MODEL], Settings(state_dir=tmp_path, preload=False))
    await provider.start(ignore)
    yield provider
    await provider.stop()


@pytest.fixture
def head(provider: LocalProvider) -> LocalHead:
    head = provider._heads["m"]
    head._folder.path.mkdir(parents=True, exist_ok=True)
    return head


def says(head: LocalHead, *lines: object) -> None:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    head._folder.log.write_text(text + "\n")


def test_a_head_that_has_logged_nothing_is_starting_its_process(head: LocalHead) -> None:
    assert "starting its process" in head.progress()
    assert "its weights have 0 bytes" in head.progress()


def test_the_last_progress_in_the_log_of_a_head_is_how_far_it_is(head: LocalHead) -> None:
    says(
        head,
        {"event": "loading", "progress": "reading the tokenizer"},
        {"event": "loading", "progress": "reading and checking the weights"},
        {"event": "a warning of a library"},
        "progress: none of ours",
        "[1]",
    )

    assert ", reading and checking the weights" in head.progress()


async def status(_request: web.Request) -> web.Response:
    """Answer as a head that is ready."""
    answer = HeadStatus(
        head="h",
        generation="g",
        model_name="m",
        ready=True,
        models=[],
        samplers=0,
        pending_requests=0,
        idle_seconds=0,
        protocol=HEAD_PROTOCOL,
    )
    return web.Response(body=answer.model_dump_json())


async def nothing(_request: web.Request) -> web.Response:
    """Answer as a head that has nothing to report."""
    return web.Response()


async def test_what_an_ended_head_has_logged_is_not_said_of_the_next(
    provider: LocalProvider, head: LocalHead
) -> None:
    says(head, {"event": "loading", "progress": "the model is loaded"})
    folder = head.unsaved.parent
    app = web.Application()
    app.add_routes([web.get(routes.HEAD_STATUS, status), web.get(routes.HEAD_LEASE, nothing)])
    async with TestServer(app) as running:
        record = {"pid": 1, "url": str(running.make_url("")).rstrip("/"), "generation": "g"}
        (folder / "head.json").write_text(json.dumps(record))
        (folder / "token").write_text("secret")
        await head.adopt()
        assert head.endpoint is not None
    await until(lambda: head.endpoint is None)

    pending = provider.pending(Placement("s:train:0", "me", "m", None, SessionOptions()))
    assert "is loading the model for 0 s, starting its process; its weights" in pending.reason


async def test_a_waiting_head_is_reported_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_head, "_PROGRESS_SECONDS", 0.0)
    steps = iter(["0 of 2 runs saved", "1 of 2 runs saved", *["2 of 2 runs saved"] * 100_000])

    with capture_logs() as logged:
        reporting = local_head._reporting("m", "the session head is stopping", lambda: next(steps))
        async with reporting:
            await until(lambda: len(logged) >= 3)

    assert logged[1] == {
        "event": "the session head is stopping",
        "log_level": "info",
        "model": "m",
        "progress": "1 of 2 runs saved",
    }


async def test_a_model_is_not_loaded_is_loading_is_ready_or_has_failed(
    provider: LocalProvider, head: LocalHead
) -> None:
    assert provider.state_of(MODEL) == "not loaded: it is when a client needs it"
    placement = Placement("s:train:0", "me", "m", None, SessionOptions())
    started = asyncio.Event()

    async def start() -> HeadEndpoint:
        await started.wait()
        raise HeadFailed("its files are damaged")

    head._starting = asyncio.create_task(start())
    head._starting.add_done_callback(head._start_finished)
    assert str(provider.state_of(MODEL)).startswith("loading for ")
    pending = provider.pending(placement)
    assert pending.queue_state == "paused_capacity"
    assert "is loading the model for " in pending.reason
    started.set()
    with pytest.raises(HeadFailed):
        await head._starting
    await asyncio.sleep(0)
    assert provider.state_of(MODEL) == "failed: its files are damaged"

    head.endpoint = HeadEndpoint("http://127.0.0.1:1", "", "g")
    assert provider.state_of(MODEL) == "ready"
    assert "creates the run, or reads its saved state" in provider.pending(placement).reason
    head.endpoint = None
