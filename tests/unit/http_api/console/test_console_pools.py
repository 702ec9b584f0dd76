"""The clusters of a pool on the page of models, in its JSON twin and in the commands."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from tinkercloud_api import cli
from tinkercloud_api.access.auth import hash_key, new_key
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import HeadEndpoint, ServedModel
from tinkercloud_api.serve.api_app import Application
from tinkercloud_protocol.heads.launch import HeldModel, HeldModels
from tinkercloud_protocol.responses.listings import GpuUse, PoolClusterUse, PoolUse
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served

ADMIN = "tml-of-an-admin-of-pools"
MIB = 1 << 20
HELD = HeldModels(
    models=[HeldModel(model_id=f"of-{owner}", model_bytes=3 * MIB) for owner in ("ann", "bob")],
    free_bytes=10 * MIB,
)
"""What the head of one of the two clusters says; the other says nothing."""
IDLE = datetime(2026, 11, 1, 10, 30, tzinfo=UTC)


class Provider(OneHead):
    """A provider with a pool of two clusters, one of which is idle."""

    def pools(self) -> Mapping[str, PoolUse]:
        full = PoolClusterUse(name="pool-a", state="Ready", slots=2, models=2, gpus=4)
        free = PoolClusterUse(name="pool-b", state="Ready", slots=8, models=0, gpus=2)
        idle = free.model_copy(update={"idle_since": IDLE, "idle_gpu_hours": 3.5})
        counts = {"clusters": 2, "ready": 1, "slots": 10, "models": 2, "waiting": 3}
        return {"tiny": PoolUse(**counts, by_cluster=[full, idle])}

    def gpus_of(self, _model: ServedModel) -> GpuUse | None:
        months = {"2026-11": 12.25, "2026-10": 3.0, "2026-07": 25.25}
        return GpuUse(gpus=6, idle_gpus=2, idle_gpu_hours=40.5, idle_gpu_hours_by_month=months)

    def clusters(self) -> Mapping[str, str]:
        return {each.model_id: "pool-a" for each in HELD.models}

    def clusters_of_heads(self) -> Mapping[HeadEndpoint, str]:
        return dict.fromkeys(self.shared_heads(), "pool-a")


@dataclass(frozen=True)
class World:
    """A server with a pool, and the keys of an admin and of two owners."""

    url: str
    keys: Mapping[str, str]
    responds: asyncio.Event
    """Whether the head responds."""

    async def page(self, owner: str) -> str:
        """Return the page of models that an owner sees."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as browser:
            answer = await browser.post("/console/login", data={"key": self.keys[owner]})
            assert answer.status_code == 303, answer.text
            return (await browser.get("/console/models")).text

    async def json(self, owner: str, path: str) -> httpx.Response:
        """Return an answer of the API to an owner."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            headers = {"x-api-key": self.keys[owner]}
            return await http.get(f"/api/v1/{path}", headers=headers)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async def models(_request: web.Request) -> web.Response:
        await responds.wait()
        return web.json_response(HELD.model_dump(mode="json"))

    fake, provider, keys = web.Application(), Provider(), {"admin": ADMIN}
    responds = asyncio.Event()
    responds.set()
    fake.router.add_route("*", "/{path:.*}", models)
    app = Application(Settings(state_dir=tmp_path, bootstrap_key=ADMIN), provider)
    async with TestServer(fake) as running, served(app) as url:
        provider.endpoint = HeadEndpoint(str(running.make_url("")).rstrip("/"), "token", "g1")
        await reached(lambda: app.context is not None)
        assert app.context is not None
        catalog = app.context.catalog
        for owner in ("ann", "bob"):
            keys[owner] = new_key()
            digest = hash_key(keys[owner])
            await catalog.add_key(key_hash=digest, name=owner, owner=owner, role=Role.USER)
            names: dict[str, Any] = {
                "id": f"s-{owner}",
                "owner": owner,
                "sdk_version": "1",
                "tags": [],
            }
            await catalog.add_session(Session(**names, user_metadata={}))
            run = TrainingRun(
                id=f"of-{owner}",
                session_id=f"s-{owner}",
                owner=owner,
                base_model="tiny",
                spec={"owner": owner, "lora": {"rank": 4}},
                user_metadata={},
            )
            run.generation = "g1"
            await catalog.add_run(run)
        yield World(url, keys, responds)
        responds.set()


async def test_an_owner_sees_all_clusters_and_on_them_only_the_own_runs(world: World) -> None:
    page = await world.page("ann")
    models = (await world.json("ann", "base_models")).json()["base_models"]
    runs = (await world.json("ann", "runs?access_scope=accessible")).json()["runs"]

    assert "of-ann" in page
    assert not [word for word in ("of-bob", "bob") if word in page]
    assert [(run["run_id"], run["cluster"]) for run in runs] == [("of-ann", "pool-a")]
    (pool,) = (model["pool"] for model in models)
    assert [(each["name"], each["memory_bytes"]) for each in pool["by_cluster"]] == [
        ("pool-a", 6 * MIB),
        ("pool-b", None),
    ]
    assert [each["free_bytes"] for each in pool["by_cluster"]] == [10 * MIB, None]
    assert (pool["memory_bytes"], pool["free_bytes"]) == (6 * MIB, 10 * MIB)


async def test_the_page_shows_slots_memory_idle_hours_and_who_is_where(world: World) -> None:
    page = await world.page("admin")

    pool = page.partition('aria-label="Base models"')[2].partition("</table>")[0]
    for part in ("1 of 2", "2 of 10", "6.0 MiB", "10.0 MiB"):
        assert part in pool, part
    clusters = page.partition('aria-label="Clusters"')[2].partition("</table>")[0]
    first, second = clusters.partition("<tbody>")[2].split("</tr>")[:2]
    for part in ("pool-a", "2 of 2", "6.0 MiB", "10.0 MiB", "of-ann", "of-bob"):
        assert part in first, part
    for part in ("pool-b", "0 of 8", "2026-11-01T10:30:00Z", "3.5"):
        assert part in second, part
    assert "of-" not in second


async def test_the_command_sums_up_each_pool_with_its_memory_and_idle_hours_by_month(
    world: World,
) -> None:
    call = ["pools", "list", "--base-url", world.url, "--api-key", world.keys["ann"]]

    listed = await asyncio.to_thread(CliRunner().invoke, cli.app, call, env={"COLUMNS": "1000"})

    rows = [line.split() for line in listed.stdout.splitlines()]
    (pool,) = [row for row in rows if row[0] == "tiny"]
    hours = "in all: 40.5, 2026-11: 12.25, 2026-10: 3"
    assert " ".join(pool) == f"tiny 2 of 10 6.0 MiB 10.0 MiB 3 2 of 6 {hours}"
    assert {"pool-a", "pool-b"} <= {row[0] for row in rows}


async def test_clusters_are_listed_without_the_figures_of_a_head_that_hangs(world: World) -> None:
    world.responds.clear()

    models = (await world.json("admin", "base_models")).json()["base_models"]
    page = await world.page("admin")

    (pool,) = (model["pool"] for model in models)
    assert [(each["name"], each["memory_bytes"]) for each in pool["by_cluster"]] == [
        ("pool-a", None),
        ("pool-b", None),
    ]
    assert (pool["memory_bytes"], pool["free_bytes"]) == (None, None)
    assert "pool-a" in page
    assert "of-ann" in page
