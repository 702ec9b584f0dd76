"""Sampling sessions are registered with heads."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import orjson
import pytest
from aiohttp import web

from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import SamplingSession, Session
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_protocol.heads.launch import SamplerSpec
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_testing.serving.providers import OneHead

PATH = "tinker://s:train:0/sampler_weights/x"
SAVED_AT = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)


@dataclass
class Head:
    """A head that records registrations, with the fields that it knows."""

    fields: set[str] = field(default_factory=lambda: {"owner", "model_path", "saved_at"})
    received: list[SamplerSpec] = field(default_factory=list)

    async def put(self, request: web.Request) -> web.Response:
        body = await request.read()
        if orjson.loads(body).keys() - self.fields:
            return web.json_response({"detail": "Extra inputs are not permitted"}, status=400)
        self.received.append(SamplerSpec.model_validate_json(body))
        return web.json_response({})


@pytest.fixture
def head() -> Head:
    return Head()


@pytest.fixture
async def locator(tmp_path: Path, head: Head) -> AsyncIterator[HeadLocator]:
    """A locator with a sampling session of the base model and two of checkpoints."""
    engine = open_database(f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}")
    await migrate(engine)
    catalog, provider = Catalog(engine), OneHead()
    await catalog.add_session(
        Session(id="s", owner="me", sdk_version="1", tags=[], user_metadata={})
    )
    for index, (path, saved_at) in enumerate([(None, None), (PATH, SAVED_AT), (PATH, None)]):
        row = SamplingSession(
            id=f"s:sample:{index}", session_id="s", owner="me", base_model="tiny", model_path=path
        )
        row.saved_at = saved_at
        await catalog.add_sampler(row)
    served = web.Application()
    served.router.add_put("/samplers/{id}", head.put)
    runner = web.AppRunner(served)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    provider.endpoint = HeadEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}", "token", "g1")
    checkpoints = Checkpoints(catalog, open_store((tmp_path / "store").as_uri()))
    async with aiohttp.ClientSession() as client:
        yield HeadLocator(catalog, checkpoints, provider, client)
    await runner.cleanup()
    await engine.dispose()


async def test_a_head_receives_the_save_time_of_a_checkpoint(
    locator: HeadLocator, head: Head
) -> None:
    for index in range(3):
        await locator.head_of_sampler(f"s:sample:{index}")

    assert head.received == [
        SamplerSpec(owner="me"),
        SamplerSpec(owner="me", model_path=PATH, saved_at=SAVED_AT),
        SamplerSpec(owner="me", model_path=PATH),
    ]
