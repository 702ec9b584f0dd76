"""The server suspends the models of inactive clients, and no others."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import aiohttp
import pytest

from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.heads import shared_heads
from tinkercloud_api.heads.activity import Activity
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.heads.shared_heads import SharedHeads
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    Limits,
    ModelSpec,
    Timings,
)
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import StateLost, Unavailable
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import TOKEN, served
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.storage.catalogs import writing
from tinkercloud_testing.training.engines import an_engine
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.serve.head_app import HeadApp
from tinkercloud_worker.head.serve.lifecycle import Lifecycle
from tinkercloud_worker.head.wire.head_token import HeadToken

pytestmark = pytest.mark.timeout(120)

SILENCE, PERIOD = timedelta(minutes=10), timedelta(seconds=30)
INACTIVITY, PERIOD = timedelta(minutes=10), timedelta(seconds=30)
SPEC = ModelSpec(owner="me", lora=LoraConfig(rank=2, seed=1))


@dataclass
class World:
    """A catalog, and a head with a model of each of two sessions."""

    catalog: Catalog
    activity: Activity
    lifecycle: Lifecycle
    client: aiohttp.ClientSession
    provider: OneHead

    def server(self) -> SharedHeads:
        """Return another server's view of the head."""
        return SharedHeads(
            self.catalog,
            self.provider,
            self.activity,
            self.client,
            inactivity=INACTIVITY,
            period=PERIOD,
        )

    async def suspended(self) -> set[str]:
        """Return the sessions whose models the head has suspended."""
        held = await self.server().models()
        return {name[0] for name, model in held.items() if model.is_suspended}


async def listen(server: SharedHeads, begin: datetime, end: datetime) -> None:
    """Run the periodic checks of a server over a period of time."""
    while begin <= end:
        await server.suspend_inactive(begin)
        begin += PERIOD


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    engine = open_database(f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}")
    await migrate(engine)
    catalog = Catalog(engine)
    config = HeadConfig(
        head="h",
        generation="g1",
        model=BaseModelSource(name="tiny", path=""),
        token_file="",
        checkpoint_root=(tmp_path / "store").as_uri(),
        scratch_dir=str(tmp_path / "scratch"),
        timings=Timings(drain_seconds=1, suspend_seconds=1),
    )
    (tmp_path / "token").write_text(TOKEN)
    with an_engine(tiny_llama(), tmp_path / "scratch") as parts:
        store = CheckpointStore(open_store(config.checkpoint_root))
        backend = Backend(config, parts.trainer, parts.sampler, parts.thread, store, frozenset())
        lifecycle = Lifecycle(config.timings, lambda: backend)
        app = HeadApp(lifecycle, Limits(), HeadToken(tmp_path / "token"), "g1")
        async with served(app) as url, aiohttp.ClientSession() as client:
            await lifecycle.wait_until_ready()
            provider = OneHead()
            provider.endpoint = HeadEndpoint(url, TOKEN, "g1")
            for name in ("a", "b"):
                await begin(catalog, lifecycle, name)
            yield World(catalog, Activity(catalog), lifecycle, client, provider)
    await catalog.close()


async def begin(catalog: Catalog, lifecycle: Lifecycle, name: str, spec: ModelSpec = SPEC) -> None:
    """Create a session with one model."""
    await catalog.add_session(
        Session(id=name, owner="me", sdk_version="1", tags=[], user_metadata={})
    )
    run = TrainingRun(
        id=f"{name}:train:0",
        session_id=name,
        owner="me",
        base_model="tiny",
        spec=spec.model_dump(mode="json"),
    )
    await catalog.add_run(run)
    await lifecycle.service.create_model(ModelId(name, 0), spec)
    await lifecycle.service.retrieve(f"{name}:train:0:0")


async def test_no_client_is_inactive_before_the_server_has_run_for_long_enough(
    world: World,
) -> None:
    start, server = now() + timedelta(days=30), world.server()

    await listen(server, start, start + INACTIVITY - PERIOD)
    assert await world.suspended() == set()

    await listen(server, start + INACTIVITY, start + INACTIVITY + PERIOD)
    assert await world.suspended() == {"a", "b"}


async def test_a_heartbeat_or_a_request_keeps_models_in_memory(world: World) -> None:
    start, server = now() - INACTIVITY, world.server()
    await listen(server, start, now())
    end = now() + INACTIVITY
    await listen(server, now(), end - PERIOD)
    assert await world.suspended() == set()
    world.activity.record_heartbeat("a")
    world.activity.touch("b:train:0")

    await listen(server, end, end)

    assert await world.suspended() == set()


async def test_only_the_models_of_inactive_clients_are_suspended(world: World) -> None:
    start, server = now() - INACTIVITY, world.server()
    await listen(server, start, now())
    row = await world.catalog.session("a")
    assert row is not None
    await world.catalog.record_heartbeats(["a"])
    await age(world.catalog, "b", INACTIVITY)

    await listen(server, now(), now())

    assert await world.suspended() == {"b"}


async def age(catalog: Catalog, session: str, by: timedelta) -> None:
    """Make a session inactive for some time."""
    moment = now() - by - timedelta(seconds=1)
    async with writing(catalog) as connection:
        row = await connection.get(Session, session)
        run = await connection.get(TrainingRun, f"{session}:train:0")
        assert row is not None
        assert run is not None
        row.last_heartbeat_at = run.last_request_at = moment


async def test_clients_are_not_inactive_after_the_machine_was_asleep(world: World) -> None:
    start, server = now(), world.server()
    await listen(server, start, start + INACTIVITY - PERIOD)

    awake = start + timedelta(hours=8)
    await listen(server, awake, awake + INACTIVITY - PERIOD)

    assert await world.suspended() == set()


async def test_an_unresponsive_head_does_not_block_others(world: World) -> None:
    start, server = now(), world.server()
    world.provider.endpoint = HeadEndpoint("http://127.0.0.1:9", TOKEN, "g0")

    await listen(server, start, start + INACTIVITY + PERIOD)

    assert await server.models() == {}


@pytest.mark.parametrize("state", ["over", "deleted"])
async def test_an_ended_run_is_not_suspended(world: World, state: str) -> None:
    start, server = now(), world.server()
    if state == "over":
        await world.catalog.finish_session("a", "success", None)
    else:
        await world.catalog.delete_run("a:train:0")

    await listen(server, start, start + INACTIVITY + PERIOD)

    assert await world.suspended() == {"b"}


async def test_sessions_of_inactive_clients_expire_after_days(world: World) -> None:
    for name, days in (("a", 91), ("b", 89)):
        await age(world.catalog, name, timedelta(days=days))

    assert await world.catalog.expired_sessions(now() - timedelta(days=90)) == ["a"]


async def test_a_run_reports_that_its_session_expired(world: World, tmp_path: Path) -> None:
    checkpoints = Checkpoints(world.catalog, open_store((tmp_path / "store").as_uri()))
    locator = HeadLocator(world.catalog, checkpoints, world.provider, world.client)
    runs = TrainingRuns(world.catalog, world.provider, checkpoints, locator)
    await age(world.catalog, "a", timedelta(days=91))

    await runs.expire_sessions(now(), days=90)

    with pytest.raises(
        StateLost, match=r"its client was inactive for 90 days \(session_expiry_days"
    ):
        await locator.head_of_run("a:train:0")
    assert set(await world.server().models()) == {"b:train:0"}


async def sweep(server: SharedHeads, begin: datetime, period: timedelta) -> list[str]:
    """Look for models that no run claims over a period; return the models that are left."""
    for moment in (begin, begin + period / 2, begin + period):
        await server.drop_orphans(moment)
    return sorted(await server.models())


async def test_a_model_that_no_run_claims_for_long_is_dropped_with_a_last_checkpoint(
    world: World, tmp_path: Path
) -> None:
    server = world.server()
    world.provider.placed, world.provider.gone = frozenset({"b:train:0"}), {"a:train:0"}
    await world.catalog.set_generation("a:train:0", "g1", after=None)

    early = await sweep(server, now(), timedelta(minutes=9))
    late = await sweep(server, now() + timedelta(minutes=9), timedelta(minutes=2))

    assert (early, late) == (["a:train:0", "b:train:0"], ["b:train:0"])
    assert list((tmp_path / "store").glob("runs/a:train:0/weights/last-*/manifest.json"))


async def test_a_model_of_a_run_that_was_moved_is_dropped_without_a_checkpoint(
    world: World, tmp_path: Path
) -> None:
    world.provider.placed = frozenset({"b:train:0"})
    await world.catalog.set_generation("a:train:0", "g2", after=None)

    left = await sweep(world.server(), now(), timedelta(minutes=10))

    assert left == ["b:train:0"]
    assert not list((tmp_path / "store").glob("runs/a:train:0/weights/*"))


@pytest.mark.parametrize("placed", [None, frozenset({"b:train:0"})], ids=["local", "stale"])
async def test_the_model_of_a_run_that_still_exists_is_never_dropped(
    world: World, placed: frozenset[str] | None
) -> None:
    world.provider.placed = placed
    await world.catalog.set_generation("a:train:0", "g1", after=None)

    left = await sweep(world.server(), now(), timedelta(minutes=30))

    assert left == ["a:train:0", "b:train:0"]


async def test_a_run_that_gets_a_place_meanwhile_is_not_dropped(world: World) -> None:
    server, start = world.server(), now()
    world.provider.placed, world.provider.gone = frozenset({"b:train:0"}), {"a:train:0"}
    await server.drop_orphans(start)
    world.provider.placed = frozenset({"a:train:0", "b:train:0"})
    await server.drop_orphans(start + timedelta(minutes=5))
    world.provider.placed = frozenset({"b:train:0"})

    assert len(await sweep(server, start + timedelta(minutes=6), timedelta(minutes=8))) == 2


async def test_a_running_server_drops_models_that_no_run_claims(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_heads, "_ORPHANED_AFTER", timedelta(0))
    world.provider.placed = frozenset({"b:train:0"})
    settings = Settings(state_dir=tmp_path / "server", session_silence_seconds=0.1)

    async with running_context(settings, world.provider) as server:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while "a:train:0" in await server.shared_heads.models():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        assert set(await server.shared_heads.models()) == {"b:train:0"}


async def test_runs_of_an_interrupted_client_are_not_ended_unsaved_while_their_head_is_silent(
    world: World, tmp_path: Path
) -> None:
    await world.catalog.set_generation("a:train:0", "g1", after=None)
    world.provider.endpoint = HeadEndpoint("http://127.0.0.1:9", TOKEN, "g1")

    async with running_context(Settings(state_dir=tmp_path), world.provider) as server:
        rows = await server.catalog.runs_of_session("a")
        with pytest.raises(Unavailable, match="did not respond"):
            await server.runs.save_interrupted(rows, now(), None)


async def test_an_interrupted_client_ends_whose_run_has_no_step_or_no_room_for_a_checkpoint(
    world: World, tmp_path: Path
) -> None:
    await world.catalog.set_generation("a:train:0", "g1", after=None)

    async with running_context(Settings(state_dir=tmp_path), world.provider) as server:
        rows = await server.catalog.runs_of_session("a")
        await server.runs.save_interrupted(rows, now(), None)
        assert await server.checkpoints.to_resume_from("a:train:0", 1) == []
        world.provider.endpoint = HeadEndpoint("http://127.0.0.1:9", TOKEN, "g1")
        await server.runs.save_interrupted(rows, now(), 0)


async def test_a_run_whose_model_could_not_be_created_can_be_stopped(
    world: World, tmp_path: Path
) -> None:
    missing = SPEC.model_copy(update={"restore_from": "tinker://a:train:0/weights/missing"})
    await begin(world.catalog, world.lifecycle, "c", missing)
    await world.catalog.set_generation("c:train:0", "g1", after=None)
    assert world.provider.endpoint is not None

    async with running_context(Settings(state_dir=tmp_path), world.provider) as server:
        endpoint = world.provider.endpoint
        assert await server.runs.end("c:train:0", endpoint, None, "its owner") is None
        row = await server.catalog.run("c:train:0")

    assert row is not None
    assert row.deleted_at is not None
