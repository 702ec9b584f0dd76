"""A suspended run is resumed once, on one head, and never from an older state."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest

from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.providers.base import HeadEndpoint, Pending, Placement
from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    HeadStatus,
    Limits,
    ModelSpec,
    Saved,
    Timings,
)
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import StateLost, Unavailable
from tinkercloud_protocol.wire.paths import CheckpointKind
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import TOKEN, served
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.engines import an_engine
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.serve.head_app import HeadApp
from tinkercloud_worker.head.serve.lifecycle import Lifecycle
from tinkercloud_worker.head.wire.head_token import HeadToken

RUN = "s:train:0"
SPEC = ModelSpec(owner="me", lora=LoraConfig(rank=2, seed=1))


class Place(OneHead):
    """A provider that knows a place of the run, which may be older than its last move."""

    def __init__(self) -> None:
        super().__init__()
        self.next_place: HeadEndpoint | None = None
        """The head that the run has been moved to, before that is known."""
        self._is_known = True

    def invalidate(self, endpoint: HeadEndpoint) -> None:
        self._is_known = self._is_known and self.endpoint != endpoint

    def find(self, _placement: Placement) -> HeadEndpoint | None:
        return self.endpoint if self._is_known else None

    async def acquire(self, placement: Placement) -> HeadEndpoint:
        self._is_known = True
        return await super().acquire(placement)

    async def changed(self, _placement: Placement) -> None:
        assert self.next_place is not None, "nothing will change any more"
        self.endpoint, self.next_place = self.next_place, None

    async def confirm(self, _placement: Placement) -> None:
        if self.next_place is not None:
            raise Unavailable("the run is being moved")


@dataclass
class World:
    """A catalog, an object store, and the heads and servers that share them."""

    folder: Path
    catalog: Catalog
    checkpoints: Checkpoints
    provider: Place
    client: aiohttp.ClientSession

    def server(self) -> HeadLocator:
        """Return the head locator of another API server."""
        return HeadLocator(self.catalog, self.checkpoints, self.provider, self.client)

    async def call(self, endpoint: HeadEndpoint, path: str, token: str = TOKEN) -> bytes:
        headers = {routes.HEAD_TOKEN_HEADER: token}
        async with self.client.post(endpoint.url + path, headers=headers) as response:
            assert response.status == 200, response.status
            return await response.read()

    async def wait_until_created(self, endpoint: HeadEndpoint) -> None:
        """Wait until the run exists in its head."""
        headers = {routes.HEAD_TOKEN_HEADER: TOKEN, routes.TARGET_HEADER: RUN}
        request = {"request_id": f"{RUN}:0"}
        url = endpoint.url + routes.RETRIEVE_FUTURE
        async with self.client.post(url, json=request, headers=headers) as response:
            assert response.status == 200

    @asynccontextmanager
    async def head(self, generation: str) -> AsyncIterator[HeadEndpoint]:
        """Serve a head, and make it the one that the provider finds."""
        config = HeadConfig(
            head="h",
            generation=generation,
            model=BaseModelSource(name="tiny", path=""),
            token_file="",
            checkpoint_root=(self.folder / "store").as_uri(),
            scratch_dir=str(self.folder / generation),
            timings=Timings(drain_seconds=1, suspend_seconds=1),
        )
        with an_engine(tiny_llama(), self.folder / generation) as engine:
            store = CheckpointStore(open_store(config.checkpoint_root))
            backend = Backend(
                config, engine.trainer, engine.sampler, engine.thread, store, frozenset()
            )
            lifecycle = Lifecycle(config.timings, lambda: backend)
            token_file = self.folder / "token"
            token_file.write_text(TOKEN)
            app = HeadApp(lifecycle, Limits(), HeadToken(token_file), generation)
            async with served(app) as url:
                ready = url + routes.HEAD_WAIT_READY
                headers = {routes.HEAD_TOKEN_HEADER: TOKEN}
                async with self.client.get(ready, headers=headers) as response:
                    assert response.status == 200
                endpoint = self.provider.endpoint = HeadEndpoint(url, TOKEN, generation)
                yield endpoint


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    engine = open_database(f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}")
    await migrate(engine)
    catalog = Catalog(engine)
    await catalog.add_session(
        Session(id="s", owner="me", sdk_version="1", tags=[], user_metadata={})
    )
    await catalog.add_run(
        TrainingRun(
            id=RUN,
            session_id="s",
            owner="me",
            base_model="tiny",
            spec=SPEC.model_dump(mode="json"),
        )
    )
    checkpoints = Checkpoints(catalog, open_store((tmp_path / "store").as_uri()))
    async with aiohttp.ClientSession() as client:
        yield World(tmp_path, catalog, checkpoints, Place(), client)
    await catalog.close()


async def generation_of_run(world: World) -> str | None:
    row = await world.catalog.run(RUN)
    assert row is not None
    return row.generation


async def test_a_suspended_run_resumes_in_the_next_head(world: World) -> None:
    server = world.server()
    async with world.head("g1") as first, world.head("g2") as second:
        world.provider.endpoint = first
        assert await server.head_of_run(RUN) == first
        status = HeadStatus.model_validate_json(await world.call(first, routes.HEAD_SUSPEND))
        assert status.suspended

        world.provider.endpoint = second
        found = await asyncio.gather(*[server.head_of_run(RUN) for _ in range(5)])

        assert found == [second] * 5
        assert await generation_of_run(world) == "g2"


async def move(world: World, source: HeadEndpoint, target: HeadEndpoint) -> None:
    """Let a head give the run away, and place the run on another one."""
    await world.call(source, f"{routes.HEAD_MOVE_MODEL}/{RUN}")
    world.provider.endpoint = target


async def test_a_run_that_returns_before_another_head_was_asked_for_it_continues(
    world: World,
) -> None:
    server = world.server()
    async with world.head("g1") as first, world.head("g2") as second:
        world.provider.endpoint = first
        await server.head_of_run(RUN)
        await world.wait_until_created(first)

        await move(world, first, second)
        await move(world, second, first)

        assert await server.head_of_run(RUN) == first, "the head that will refuse it"
        world.provider.invalidate(first)
        server.note_refusal(RUN, first)
        assert await server.head_after(RUN, first) == first
        await world.wait_until_created(first)
        assert await generation_of_run(world) == "g1"


async def test_a_run_that_returns_after_another_server_had_resumed_it_elsewhere_continues(
    world: World,
) -> None:
    server = world.server()
    async with world.head("g1") as first, world.head("g2") as second:
        world.provider.endpoint = first
        await server.head_of_run(RUN)
        await world.wait_until_created(first)

        await move(world, first, second)
        await world.server().head_of_run(RUN)
        assert await generation_of_run(world) == "g2"
        await move(world, second, first)
        world.provider.invalidate(first)
        server.note_refusal(RUN, first)

        assert await server.head_after(RUN, first) == first
        await world.wait_until_created(first)
        assert await generation_of_run(world) == "g1"


async def test_a_run_that_is_still_being_moved_is_not_continued_on_the_head_that_it_leaves(
    world: World,
) -> None:
    server = world.server()
    async with world.head("g1") as first, world.head("g2") as second:
        world.provider.endpoint = first
        await server.head_of_run(RUN)
        await world.wait_until_created(first)
        await world.call(first, f"{routes.HEAD_MOVE_MODEL}/{RUN}")
        world.provider.next_place = second
        world.provider.invalidate(first)
        server.note_refusal(RUN, first)

        assert await server.head_after(RUN, first) == second
        assert await generation_of_run(world) == "g2"


async def test_a_head_suspends_for_its_own_server_only(world: World) -> None:
    async with world.head("g1") as head:
        headers = {routes.HEAD_TOKEN_HEADER: "guessed"}
        for path in (routes.HEAD_SUSPEND, routes.HEAD_CHECKPOINT):
            async with world.client.post(head.url + path, headers=headers) as response:
                assert response.status == 401


async def test_a_server_that_died_before_it_wrote_the_catalog_is_repaired_by_the_next_request(
    world: World,
) -> None:
    async with world.head("g1") as first, world.head("g2") as second:
        world.provider.endpoint = first
        await world.server().head_of_run(RUN)
        await world.call(first, routes.HEAD_SUSPEND)
        world.provider.endpoint = second
        spec = SPEC.model_copy(update={"resume_generation": "g1"}).model_dump_json()
        headers = {routes.HEAD_TOKEN_HEADER: TOKEN}
        url = f"{second.url}{routes.HEAD_MODELS}/{RUN}"
        async with world.client.put(url, data=spec, headers=headers) as response:
            assert response.status == 200
        assert await generation_of_run(world) == "g1"

        assert await world.server().head_of_run(RUN) == second
        assert await generation_of_run(world) == "g2"


async def test_a_server_that_missed_a_resume_does_not_undo_it(world: World) -> None:
    one, other = world.server(), world.server()
    async with world.head("g1") as first, world.head("g2") as second, world.head("g3") as third:
        world.provider.endpoint = first
        await one.head_of_run(RUN)
        await other.head_of_run(RUN)
        await world.call(first, routes.HEAD_SUSPEND)
        world.provider.endpoint = second
        await other.head_of_run(RUN)

        assert await one.head_of_run(RUN) == second
        world.provider.endpoint = third
        with pytest.raises(StateLost, match="session head stopped"):
            await one.head_of_run(RUN)
        with pytest.raises(StateLost, match="session head stopped"):
            await other.head_of_run(RUN)


async def test_one_of_two_servers_that_place_a_run_yields(world: World) -> None:
    assert await world.catalog.set_generation(RUN, "g1", after=None)
    assert await world.catalog.set_generation(RUN, "g1", after=None)
    assert await world.catalog.set_generation(RUN, "g2", after="g1")

    assert not await world.catalog.set_generation(RUN, "g3", after="g1")

    assert await generation_of_run(world) == "g2"


async def test_a_run_of_a_vanished_head_is_lost_since_its_automatic_checkpoint(
    world: World,
) -> None:
    server = world.server()
    async with world.head("g1") as first, world.head("g2") as second:
        world.provider.endpoint = first
        await server.head_of_run(RUN)
        await world.wait_until_created(first)
        saved = Saved.model_validate_json(await world.call(first, routes.HEAD_CHECKPOINT))
        (path,) = saved.checkpoints

        world.provider.endpoint = second

        with pytest.raises(StateLost) as raised:
            await server.head_of_run(RUN)
        assert path in raised.value.message
        (listed,) = await world.checkpoints.of_run(RUN)
        assert listed.tinker_path == path
        assert listed.checkpoint_type == CheckpointKind.TRAINING.checkpoint_type


async def test_a_deleted_run_is_not_resumed_and_leaves_no_suspended_state(
    world: World,
) -> None:
    server = world.server()
    async with world.head("g1") as first:
        await server.head_of_run(RUN)
        await world.call(first, routes.HEAD_SUSPEND)
        assert await world.checkpoints.suspended.has(RUN, "g1", None)

        await world.catalog.finish_session("s", "success", None)
        await server.deleted.release(await world.catalog.runs_of_session("s"), [])

        assert not await world.checkpoints.suspended.has(RUN, "g1", None)
        assert list((world.folder / "store").rglob("*.safetensors")) == []
        with pytest.raises(StateLost, match="was deleted"):
            await world.server().head_of_run(RUN)


async def test_state_suspended_after_the_deletion_of_its_run_is_removed_later(
    world: World,
) -> None:
    server = world.server()
    async with world.head("g1") as first:
        await server.head_of_run(RUN)
        await world.catalog.finish_session("s", "success", None)
        await world.call(first, routes.HEAD_SUSPEND)
    world.provider.endpoint = None
    now = datetime.now(UTC)

    await server.deleted.release_leftovers(now)
    assert await world.checkpoints.suspended.has(RUN, "g1", None)
    await server.deleted.release_leftovers(now + timedelta(days=1))

    assert not await world.checkpoints.suspended.has(RUN, "g1", None)
    assert await world.catalog.runs_to_sweep(now + timedelta(days=1)) == []


async def test_pending_runs_are_counted_by_their_queue_state(
    world: World,
) -> None:
    class Slow(Place):
        def __init__(self) -> None:
            super().__init__()
            self.asked = asyncio.Event()

        async def acquire(self, _placement: Placement) -> HeadEndpoint:
            self.asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        def pending(self, _placement: Placement) -> Pending:
            return Pending("paused_capacity", "no node is free")

    provider = world.provider = Slow()
    server = world.server()
    assert not server.pending_counts()

    row = await world.catalog.run(RUN)
    assert row is not None
    server.start_placing(row)
    await provider.asked.wait()

    assert server.pending_counts() == {"paused_capacity": 1}
