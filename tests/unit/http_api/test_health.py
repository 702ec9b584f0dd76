"""What health checks say while the checkpoint store fails."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine, event

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.routes import health
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_api.serve.hot_paths import HotPaths
from tinkercloud_api.web import error_handlers
from tinkercloud_testing.serving.providers import OneHead

KEY = "tml-a-valid-key-of-these-tests"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with running_context(Settings(state_dir=tmp_path, bootstrap_key=KEY), OneHead()) as known:
        api = FastAPI(openapi_url=None)
        api.include_router(health.router)
        error_handlers.install(api)
        api.state.context = known
        transport = httpx.ASGITransport(app=HotPaths(api, lambda: known, api.routes))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            yield client


def break_store(state_dir: Path) -> None:
    """Make all access to the store of checkpoints fail, for root too."""
    folder = state_dir / "checkpoints"
    folder.rename(state_dir / "aside")
    folder.write_text("a file where a folder is to be")


async def test_a_server_is_ready_but_not_healthy_without_its_checkpoint_store(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    assert (await client.get("/healthz")).status_code == 200
    assert (await client.get("/readyz")).status_code == 200

    break_store(tmp_path)

    assert (await client.get("/healthz")).status_code == 503
    assert (await client.get("/readyz")).status_code == 200


async def test_requests_that_arrive_during_a_check_share_it(client: httpx.AsyncClient) -> None:
    seen: list[str] = []

    def note(*arguments: Any) -> None:
        if arguments[2] == "SELECT 1":
            seen.append(arguments[2])

    event.listen(Engine, "before_cursor_execute", note)
    try:
        answers = await asyncio.gather(*(client.get("/healthz") for _ in range(20)))
        first = len(seen)
        await client.get("/healthz")
    finally:
        event.remove(Engine, "before_cursor_execute", note)

    assert {each.status_code for each in answers} == {200}
    assert (first, len(seen)) == (1, 2)


async def test_the_health_that_a_caller_sees_names_the_failure_of_the_store(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    async def shown() -> tuple[str, str]:
        answer = await client.get("/api/v1/health", headers={"x-api-key": KEY})
        assert answer.status_code == 200
        content = answer.json()
        return content["status"], str(content["checkpoint_store_failure"])

    assert await shown() == ("healthy", "None")
    break_store(tmp_path)
    status, failure = await shown()
    assert status == "degraded"
    assert "object store for checkpoints failed" in failure
