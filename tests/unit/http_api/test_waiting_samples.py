"""`sample` waits for its result: with a limit, and only as long as its client is there."""

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fastapi import FastAPI

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.context import Context
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_api.serve.hot_paths import HotPaths
from tinkercloud_protocol.heads.launch import Timings
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.providers import OneHead

KEY = "tml-of-samples-that-are-awaited"
BODY = orjson.dumps({"base_model": "tiny", "prompt": {"tokens": [1]}})


class FakeHead:
    """A head whose responses to polls are given."""

    def __init__(self) -> None:
        self.polled = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.request_id = ""
        self.bodies: list[dict[str, object]] = []
        self.answers: Callable[[], web.StreamResponse] = pending

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == routes.ASAMPLE:
            self.bodies.append(await request.json())
            self.request_id = f"{request.headers[routes.TARGET_HEADER]}:{1 << 62}"
            return web.json_response({"request_id": self.request_id})
        if request.path == routes.RETRIEVE_FUTURE:
            await asyncio.sleep(0.01)
            self.polled.set()
            return self.answers()
        if request.path == routes.CANCEL_FUTURE:
            self.cancelled.set()
        return web.json_response({})


def pending() -> web.Response:
    return web.json_response({"type": "try_again"}, status=408)


@pytest.fixture
async def head() -> FakeHead:
    return FakeHead()


@pytest.fixture
async def server(tmp_path: Path, head: FakeHead) -> AsyncIterator[Context]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", head.serve)
    settings = Settings(
        state_dir=tmp_path,
        bootstrap_key=KEY,
        sample_wait_seconds=0.2,
        timings=Timings(long_poll_seconds=0.1),
    )
    provider = OneHead()
    async with TestServer(app) as fake, running_context(settings, provider) as context:
        provider.endpoint = HeadEndpoint(str(fake.make_url("")).rstrip("/"), "token", "g1")
        yield context


class Client:
    """A client (ASGI) that sends one request and may disconnect."""

    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.gone = asyncio.Event()
        self.has_sent = False
        self.received: list[MutableMapping[str, Any]] = []
        self.headers = [(b"x-api-key", KEY.encode()), (b"content-length", b"9"), *headers]

    async def receive(self) -> MutableMapping[str, Any]:
        if not self.has_sent:
            self.has_sent = True
            return {"type": "http.request", "body": BODY}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.received.append(message)

    async def post(self, server: Context) -> None:
        app = HotPaths(FastAPI(), lambda: server, [])
        scope = {"type": "http", "method": "POST", "path": routes.SAMPLE, "headers": self.headers}
        await app(scope, self.receive, self.send)

    @property
    def answer(self) -> tuple[int, dict[str, Any]]:
        body = b"".join(message.get("body", b"") for message in self.received)
        return self.received[0]["status"], orjson.loads(body)


async def test_a_sample_that_takes_too_long_names_the_request(
    server: Context, head: FakeHead
) -> None:
    client = Client()

    await client.post(server)

    status, answer = client.answer
    assert (status, answer["request_id"]) == (503, head.request_id)
    assert "Poll retrieve_future" in answer["detail"]


@pytest.mark.parametrize(("category", "status"), [("user", 400), ("server", 503), ("unknown", 503)])
async def test_a_failure_has_a_status(
    server: Context, head: FakeHead, category: str, status: int
) -> None:
    head.answers = lambda: web.json_response({"error": "no luck", "category": category})
    client = Client()

    await client.post(server)

    assert client.answer == (status, {"detail": "no luck"})


async def test_a_long_result_is_passed_on_unchanged(server: Context, head: FakeHead) -> None:
    result = {"sequences": [{"tokens": list(range(50_000))}]}
    head.answers = lambda: web.json_response(result)
    client = Client()

    await client.post(server)

    assert client.answer == (200, result)
    assert head.bodies == [orjson.loads(BODY)]


@pytest.mark.parametrize("key", [(), ((b"x-idempotency-key", b"k"),)])
async def test_a_client_that_disconnects_cancels_a_sample_that_it_cannot_ask_for_again(
    tmp_path: Path, server: Context, head: FakeHead, key: tuple[tuple[bytes, bytes], ...]
) -> None:
    object.__setattr__(
        server, "settings", server.settings.model_copy(update={"sample_wait_seconds": 600.0})
    )
    client = Client(*key)
    posting = asyncio.create_task(client.post(server))
    await head.polled.wait()

    client.gone.set()
    await posting

    assert head.cancelled.is_set() == (key == ())
    assert client.received == []
