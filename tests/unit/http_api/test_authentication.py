"""Every call is authenticated in the same way, by its headers alone."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tinkercloud_api import errors, hot_paths, throttle
from tinkercloud_api.app import running_context
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.hot_paths import HotPaths
from tinkercloud_api.http import DISCARD_WITHOUT_KEY
from tinkercloud_api.routes import health, runs, sessions
from tinkercloud_api.settings import Settings
from tinkercloud_protocol import routes
from tinkercloud_protocol.errors import Overloaded
from tinkercloud_testing.providers import OneHead

KEY = "tml-a-valid-key-of-these-tests"
CALLS = [
    ("POST", routes.FORWARD_BACKWARD),
    ("POST", routes.RETRIEVE_FUTURE),
    ("POST", "/api/v1/create_session"),
    ("POST", "/api/v1/a_call_of_next_year"),
    ("GET", "/api/v1/training_runs"),
    ("GET", "/api/v1/nothing"),
]


@pytest.fixture
async def asgi(tmp_path: Path) -> AsyncIterator[HotPaths]:
    settings = Settings(state_dir=tmp_path, bootstrap_key=KEY)
    async with running_context(settings, OneHead()) as context:
        api = FastAPI()
        for module in (sessions, runs, health):
            api.include_router(module.router)
        errors.install(api)
        api.state.context = context
        yield HotPaths(api, lambda: context, api.routes)


@pytest.fixture
async def client(asgi: HotPaths) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=asgi)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        yield client


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_every_call_without_a_key_is_rejected(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    answer = await client.request(method, path, content=b"no json")

    assert answer.status_code == 401
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_two_keys_in_one_request_are_rejected(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    headers = [("x-api-key", KEY), ("X-API-Key", KEY)]

    answer = await client.request(method, path, headers=headers)

    assert answer.status_code == 400
    assert answer.json()["detail"] == "x-api-key: sent 2 times; send this header once"


async def test_health_checks_need_no_key(client: httpx.AsyncClient) -> None:
    assert (await client.get("/livez")).status_code == 200
    assert (await client.get("/readyz")).status_code == 200
    assert (await client.get("/api/v1/healthz")).status_code != 401


class Upload:
    """A client that uploads endlessly and counts the bytes that were read."""

    def __init__(self) -> None:
        self.taken = 0
        self.answers: list[MutableMapping[str, Any]] = []

    async def receive(self) -> MutableMapping[str, Any]:
        self.taken += 1 << 20
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": True}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.answers.append(message)


@pytest.mark.parametrize("path", [routes.FORWARD_BACKWARD, "/api/v1/create_session"])
async def test_little_of_a_body_is_read_without_a_key(asgi: HotPaths, path: str) -> None:
    upload = Upload()
    headers = [(b"transfer-encoding", b"chunked"), (b"x-api-key", b"tml-none")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}

    await asgi(scope, upload.receive, upload.send)

    assert upload.answers[0]["status"] == 401
    assert (b"connection", b"close") in upload.answers[0]["headers"]
    assert upload.taken <= DISCARD_WITHOUT_KEY.max_bytes + (1 << 20)


async def test_an_address_that_guesses_keys_causes_few_lookups(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "_ATTEMPTS_PER_SECOND", 0.0)
    looked_up = []
    real = Catalog.key

    async def counted(catalog: Catalog, key_hash: str) -> Any:
        looked_up.append(key_hash)
        return await real(catalog, key_hash)

    monkeypatch.setattr(Catalog, "key", counted)
    path = "/api/v1/training_runs"
    assert (await client.get(path, headers={"x-api-key": KEY})).status_code == 200

    guesses = [await client.get(path, headers={"x-api-key": f"tml-{i}"}) for i in range(40)]
    after = await client.get(path, headers={"x-api-key": KEY})

    assert [guess.status_code for guess in guesses] == [401] * 20 + [429] * 20
    assert guesses[-1].headers["retry-after"] == "1"
    assert len(looked_up) == 21
    assert after.status_code == 200


def test_an_address_may_retry_later_and_others_at_once() -> None:
    now = [0.0]
    counts = throttle.Throttle(lambda: now[0])
    for _ in range(20):
        counts.check("2001:db8::1")
        counts.record_failure("2001:db8::1")

    with pytest.raises(Overloaded):
        counts.check("2001:db8::ffff")
    counts.check("2001:db8:0:1::1")
    counts.check("10.0.0.1")
    now[0] = 1.0
    counts.check("2001:db8::1")


def test_a_limited_number_of_addresses_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "_MAX_ADDRESSES", 3)
    counts = throttle.Throttle()
    for last in range(10):
        counts.record_failure(f"10.0.0.{last}")

    assert len(counts._tried) == 3


async def test_a_slow_body_without_a_key_is_not_awaited(
    asgi: HotPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hot_paths, "DISCARD_WITHOUT_KEY", replace(DISCARD_WITHOUT_KEY, max_seconds=0.05)
    )
    upload = Upload()

    async def never() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        return {}

    headers = [(b"content-length", b"9")]
    scope = {"type": "http", "method": "POST", "path": routes.OPTIM_STEP, "headers": headers}

    await asgi(scope, never, upload.send)

    assert upload.answers[0]["status"] == 401


async def test_a_valid_key_may_send_many_requests_at_once_from_the_start(
    client: httpx.AsyncClient,
) -> None:
    path = "/api/v1/training_runs"

    answers = await asyncio.gather(
        *[client.get(path, headers={"x-api-key": KEY}) for _ in range(60)]
    )

    assert {answer.status_code for answer in answers} == {200}
