"""Polls for results wait during outages: on a failure the SDK would retry without a delay."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import obstore
import pytest
from fastapi import FastAPI
from obstore.exceptions import UnauthenticatedError

from tinkercloud_api.catalog.schema.tables import Session, TrainingRun
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.context import Context
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.routes.checkpoints import run_routes
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_api.serve.hot_paths import HotPaths
from tinkercloud_api.web import error_handlers
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.serving.providers import OneHead

KEY = "tml-of-the-polls-that-are-held"
RUN = "s:train:0"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Context]:
    """A server whose head is gone; its run may have been suspended."""
    provider = OneHead()
    provider.endpoint = HeadEndpoint(f"http://127.0.0.1:{free_port()}", "token", "g2")
    settings = Settings(state_dir=tmp_path, bootstrap_key=KEY)
    async with running_context(settings, provider) as context:
        session = Session(id="s", owner="bootstrap", sdk_version="1", tags=[], user_metadata={})
        await context.catalog.add_session(session)
        spec = ModelSpec(owner="bootstrap", lora=None).model_dump(mode="json")
        run = TrainingRun(
            id=RUN,
            session_id="s",
            owner="bootstrap",
            base_model="tiny",
            spec=spec,
            generation="g1",
        )
        await context.catalog.add_run(run)
        yield context


@pytest.fixture
async def client(server: Context) -> AsyncIterator[httpx.AsyncClient]:
    api = FastAPI(openapi_url=None)
    api.include_router(run_routes.router)
    error_handlers.install(api)
    api.state.context = server
    asgi = httpx.ASGITransport(app=HotPaths(api, lambda: server, api.routes))
    headers = {routes.API_KEY_HEADER: KEY}
    async with httpx.AsyncClient(transport=asgi, base_url="http://t", headers=headers) as client:
        yield client


async def poll(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post(routes.RETRIEVE_FUTURE, json={"request_id": f"{RUN}:3"}, timeout=30)


async def test_polls_wait_and_lists_fail_while_the_store_is_unreachable(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> Any:
        raise UnauthenticatedError("ExpiredToken")

    for name in ("get_async", "list_with_delimiter_async"):
        monkeypatch.setattr(obstore, name, refuse)

    polled = await poll(client)
    listed = await client.get(f"/api/v1/training_runs/{RUN}/checkpoints")

    assert (polled.status_code, polled.json()["type"]) == (408, "try_again")
    assert listed.status_code == 503
    assert "object store" in listed.json()["detail"]


async def test_polls_wait_while_a_head_does_not_respond(
    client: httpx.AsyncClient, server: Context
) -> None:
    await server.catalog.set_generation(RUN, "g2", after="g1")

    polled = await poll(client)

    assert (polled.status_code, polled.json()["type"]) == (408, "try_again")
    assert "head stopped responding" in polled.json()["queue_state_reason"]
