"""JSON routes report invalid requests with the same messages as the hot paths."""

import httpx
import pytest
from fastapi import FastAPI

from tinkercloud_api.routes.checkpoints.run_routes import Limit
from tinkercloud_api.routes.sessions.session_routes import CreateSession
from tinkercloud_api.web import error_handlers
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import parse_json

METADATA = ",".join(f'"{number}":"x"' for number in range(65))


async def refusal(method: str, path: str, body: bytes = b"") -> str:
    api = FastAPI()
    error_handlers.install(api)

    @api.post("/sessions")
    async def create(request: CreateSession) -> None: ...

    @api.get("/sessions")
    async def show(limit: Limit) -> None: ...

    transport = httpx.ASGITransport(app=api)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        headers = {"content-type": "application/json"}
        answer = await client.request(method, path, content=body, headers=headers)
    assert answer.status_code == 400
    return str(answer.json()["detail"])


@pytest.mark.parametrize(
    "body",
    [
        b'{"sdk_version": 1, "tags": [2]}',
        b'{"sdk_version": "x", "user_metadata": {%b}}' % METADATA.encode(),
    ],
)
async def test_an_invalid_body_is_rejected_as_on_the_hot_paths(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_json(CreateSession, body)

    assert await refusal("POST", "/sessions", body) == raised.value.message


async def test_invalid_json_is_reported_for_the_whole_body() -> None:
    assert await refusal("POST", "/sessions", b"{") == "request body: JSON decode error"


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"[" * 100_000, "nested too deeply"), (b'{"sdk_version": "\xff"}', "not UTF-8")],
)
async def test_an_unparsable_body_is_rejected_with_the_reason(body: bytes, reason: str) -> None:
    assert reason in await refusal("POST", "/sessions", body)


async def test_an_invalid_query_value_is_shown() -> None:
    detail = await refusal("GET", "/sessions?limit=0")

    assert detail == "limit: Input should be greater than or equal to 1 (got '0')"
