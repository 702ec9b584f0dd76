"""A request that runs counts as use of its head until its response has ended."""

import asyncio
from pathlib import Path

import httpx
from aiohttp import web
from aiohttp.test_utils import TestServer

from tinkercloud_api.catalog.schema.tables import Session, TrainingRun
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import HeadEndpoint, Placement
from tinkercloud_api.serve.api_app import Application
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served

KEY = "tml-of-somebody-who-waits"
RUN = "s:train:0"


class Counting(OneHead):
    """A provider that counts how often its head is found, which is use of it."""

    uses = 0

    def find(self, placement: Placement) -> HeadEndpoint | None:
        self.uses += placement.target == RUN
        return super().find(placement)


async def test_a_response_that_takes_long_counts_as_use_again_and_again_until_it_has_ended(
    tmp_path: Path,
) -> None:
    may_end = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        await may_end.wait()
        await response.write(b"}")
        return response

    head, provider = web.Application(), Counting()
    head.router.add_route("*", "/{path:.*}", answer)
    settings = Settings(state_dir=tmp_path, bootstrap_key=KEY, housekeeping_seconds=0.01)
    app = Application(settings, provider)
    async with (
        TestServer(head) as running,
        served(app) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers={"x-api-key": KEY}) as http,
    ):
        provider.endpoint = HeadEndpoint(str(running.make_url("")).rstrip("/"), "token", "g1")
        await reached(lambda: app.context is not None)
        assert app.context is not None
        await add_run(app)
        body = {"request_id": f"{RUN}:1"}
        asked = asyncio.create_task(http.post("/api/v1/retrieve_future", json=body))
        await reached(lambda: provider.uses > 0)
        at_start = provider.uses
        await reached(lambda: provider.uses >= at_start + 3)

        may_end.set()
        answered = await asked
        await reached(lambda: app.context is not None and not app.context.proxy.running)

    assert answered.text == "{}"


async def add_run(app: Application) -> None:
    assert app.context is not None
    catalog = app.context.catalog
    (key,) = await catalog.keys()
    of_owner = {"owner": key.owner, "user_metadata": {}}
    await catalog.add_session(Session(id="s", tags=[], sdk_version="1", **of_owner))
    spec = {"owner": key.owner, "lora": {"rank": 4}}
    run = TrainingRun(id=RUN, session_id="s", base_model="tiny", spec=spec, **of_owner)
    run.generation = "g1"
    await catalog.add_run(run)
