"""Every call is authenticated in the same way, by its headers alone."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError

from tinkercloud_api.access import failed_logins
from tinkercloud_api.access.auth import Principal, hash_key, new_key
from tinkercloud_api.access.roles import Role
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.routes import health
from tinkercloud_api.routes.checkpoints import run_routes
from tinkercloud_api.routes.sessions import session_routes
from tinkercloud_api.serve import hot_paths
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_api.serve.hot_paths import HotPaths
from tinkercloud_api.serve.run_server import proxy_options
from tinkercloud_api.web import error_handlers
from tinkercloud_api.web.asgi_http import DISCARD_WITHOUT_KEY
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.asgi import Receive, Scope, Send, respond
from tinkercloud_protocol.wire.errors import Overloaded, Unauthenticated
from tinkercloud_testing.serving.providers import OneHead

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
        api = FastAPI(openapi_url=None)
        for module in (session_routes, run_routes, health):
            api.include_router(module.router)
        error_handlers.install(api)
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


async def test_an_address_that_guesses_keys_does_not_lock_out_valid_ones(
    client: httpx.AsyncClient, asgi: HotPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_logins, "_ATTEMPTS_PER_SECOND", 0.0)
    path = "/api/v1/training_runs"

    guesses = [await client.get(path, headers={"x-api-key": f"tml-{i}"}) for i in range(40)]
    another = new_key()
    await asgi._server().catalog.add_key(
        key_hash=hash_key(another), name="new", owner="new", role=Role.USER
    )
    valid = [await client.get(path, headers={"x-api-key": key}) for key in (KEY, another)]

    assert [guess.status_code for guess in guesses] == [401] * 20 + [429] * 20
    assert guesses[-1].headers["retry-after"] == "1"
    assert [answer.status_code for answer in valid] == [200, 200]


async def test_guesses_from_addresses_over_the_limit_are_looked_up_a_few_at_a_time() -> None:
    counts, running, most = failed_logins.Throttle(), 0, 0

    async def look_up() -> Principal:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        raise Unauthenticated("unknown")

    async def guess(address: str) -> None:
        with pytest.raises((Unauthenticated, Overloaded)):
            await counts.holder(address, look_up)

    addresses = ["10.0.0.1", "10.0.0.2"]
    for address in addresses * 20:
        await guess(address)
    assert all(map(counts.is_over, addresses))
    most = 0
    await asyncio.gather(*[guess(address) for address in addresses * 20])

    assert most == 2


def test_an_address_may_retry_later_and_others_at_once() -> None:
    now = [0.0]
    counts = failed_logins.Throttle(lambda: now[0])
    for _ in range(20):
        assert not counts.is_over("2001:db8::1")
        counts.record_failure("2001:db8::1")

    assert counts.is_over("2001:db8::ffff")
    assert not counts.is_over("2001:db8:0:1::1")
    assert not counts.is_over("10.0.0.1")
    now[0] = 1.0
    assert not counts.is_over("2001:db8::1")


@pytest.mark.parametrize("peer", ["127.0.0.1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    ("trusted", "address"),
    [
        ([], None),
        (["127.0.0.0/8"], "192.0.2.7"),
        (["127.0.0.1", "192.0.2.0/24"], "203.0.113.9"),
        (["10.0.0.0/8", "fd00::/8"], None),
    ],
)
async def test_only_trusted_proxies_name_the_address_of_a_client(
    monkeypatch: pytest.MonkeyPatch, peer: str, trusted: list[str], address: str | None
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    seen = []

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        seen.append(scope["client"][0])
        await respond(send, b"{}")

    settings = Settings.model_validate({"trusted_proxies": trusted})
    config = uvicorn.Config(app, lifespan="off", log_config=None, **proxy_options(settings))
    config.load()
    transport = httpx.ASGITransport(app=config.loaded_app, client=(peer, 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        await client.get("/", headers={"x-forwarded-for": "203.0.113.9, 192.0.2.7"})

    assert seen == [address or peer]


@pytest.mark.parametrize("wrong", ["*", "10.0.0.1/8", "proxy.example.com"])
def test_a_trusted_proxy_is_an_address_or_a_network(wrong: str) -> None:
    with pytest.raises(ValidationError, match="trusted_proxies"):
        Settings.model_validate({"trusted_proxies": [wrong]})


def test_clients_with_ipv4_are_counted_one_by_one_on_a_socket_of_both_protocols() -> None:
    counts = failed_logins.Throttle(lambda: 0.0)
    for _ in range(20):
        counts.record_failure("::ffff:10.0.0.1")

    assert counts.is_over("::ffff:10.0.0.1")
    assert counts.is_over("10.0.0.1")
    assert not counts.is_over("::ffff:10.0.0.2")


def test_a_limited_number_of_addresses_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_logins, "_MAX_ADDRESSES", 3)
    counts = failed_logins.Throttle(lambda: 0.0)
    for _ in range(20):
        counts.record_failure("10.0.0.0")
    assert counts.is_over("10.0.0.0")

    for last in (1, 2, 3):
        counts.record_failure(f"10.0.0.{last}")

    assert not counts.is_over("10.0.0.0")


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
