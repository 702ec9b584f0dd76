"""All resources of an ended session are released, even if its heads were busy or unreachable."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import SamplingSession, Session, TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.checkpoints.deferred_requests import Deferred
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.providers.base import HeadEndpoint, Placement
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_protocol.heads.checkpoint_manifest import (
    CheckpointManifest,
    encode_manifest,
    suspended_key,
)
from tinkercloud_protocol.heads.journal_copy import FOLDER, object_key
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire.errors import InvalidRequest, StateLost, Unavailable
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId
from tinkercloud_protocol.wire.paths import CheckpointPath, evicted_prefix
from tinkercloud_testing.serving.providers import OneHead

SPEC = ModelSpec(owner="me", lora=None).model_dump(mode="json")
ME = Principal(1, "key", "me", Role.USER)


class Cluster(OneHead):
    """A provider whose heads load until `is_loaded` is set, with one head per run."""

    def __init__(self) -> None:
        super().__init__()
        self.is_loaded = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.held: list[str] = []
        self.failing: set[str] = set()
        """Runs whose release fails."""

    async def acquire(self, placement: Placement) -> HeadEndpoint:
        self.is_asked.set()
        await self.is_loaded.wait()
        return await super().acquire(placement)

    def runs(self) -> list[str]:
        return list(self.held)

    async def release(self, placement: Placement) -> None:
        if placement.target in self.failing:
            raise Unavailable("Kubernetes does not answer")
        if placement.target in self.held:
            self.held.remove(placement.target)


@dataclass
class HeadStub:
    """A head that records created models and deletions."""

    models: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)
    concurrent_calls: int = 0
    max_concurrent_calls: int = 0
    is_failing: bool = False
    damage: str | None = None
    """Why no model can be resumed, if so."""

    async def put(self, request: web.Request) -> web.Response:
        if self.damage is not None:
            return web.json_response({"detail": self.damage}, status=400)
        self.models.add(request.match_info["id"])
        return web.json_response({})

    async def delete(self, request: web.Request) -> web.Response:
        self.concurrent_calls += 1
        self.max_concurrent_calls = max(self.max_concurrent_calls, self.concurrent_calls)
        await asyncio.sleep(0)
        self.released.append(request.match_info["id"])
        self.models.discard(request.match_info["id"])
        self.concurrent_calls -= 1
        return web.json_response({}, status=500 if self.is_failing else 200)


@dataclass
class World:
    catalog: Catalog
    provider: Cluster
    head: HeadStub
    client: aiohttp.ClientSession
    checkpoints: Checkpoints
    locator: HeadLocator = field(init=False)
    runs: TrainingRuns = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Replace the server by another one with the same catalog."""
        self.locator = HeadLocator(self.catalog, self.checkpoints, self.provider, self.client)
        self.runs = TrainingRuns(self.catalog, self.provider, self.checkpoints, self.locator)

    async def begin(self, index: int) -> str:
        row = TrainingRun(
            id=f"s:train:{index}", session_id="s", owner="me", base_model="tiny", spec=SPEC
        )
        await self.catalog.add_run(row)
        self.provider.held.append(row.id)
        return row.id

    async def sample_from(self, run_id: str | None, index: int) -> None:
        row = SamplingSession(
            id=f"s:sample:{index}", session_id="s", owner="me", base_model="tiny", run_id=run_id
        )
        await self.catalog.add_sampler(row)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    engine = open_database(f"sqlite+aiosqlite:///{tmp_path / 'catalog.db'}")
    await migrate(engine)
    catalog, head, provider = Catalog(engine), HeadStub(), Cluster()
    session = Session(id="s", owner="me", sdk_version="1", tags=[], user_metadata={})
    await catalog.add_session(session)
    served = web.Application()
    served.router.add_put("/{kind}/{id}", head.put)
    served.router.add_delete("/{kind}/{id}", head.delete)
    runner = web.AppRunner(served)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    provider.endpoint = HeadEndpoint(f"http://127.0.0.1:{port}", "token", "g1")
    checkpoints = Checkpoints(catalog, open_store((tmp_path / "store").as_uri()))
    async with aiohttp.ClientSession() as client:
        yield World(catalog, provider, head, client, checkpoints)
    await runner.cleanup()
    await catalog.close()


async def test_a_run_whose_session_ends_while_its_head_starts_leaves_no_state_in_the_head(
    world: World,
) -> None:
    run_id, endpoint = await world.begin(0), world.provider.endpoint
    world.provider.endpoint = None
    waiting = asyncio.create_task(world.locator.head_of_run(run_id))
    await world.provider.is_asked.wait()

    await world.runs.finish_session("s", "interrupted", None)
    world.provider.endpoint = endpoint
    world.provider.is_loaded.set()

    with pytest.raises(StateLost, match="was deleted"):
        await waiting
    assert world.head.models == set()
    row = await world.catalog.run(run_id)
    assert row is not None
    assert row.generation is None


async def test_resources_that_cannot_be_released_at_the_end_of_a_session_are_released_later(
    world: World,
) -> None:
    run_ids = [await world.begin(index) for index in range(3)]
    world.provider.failing = {run_ids[0]}

    await world.runs.finish_session("s", "success", None)
    assert world.provider.held == run_ids[:1]
    await world.locator.deleted.release_leftovers(datetime.now(UTC))
    assert world.provider.held == run_ids[:1]
    world.provider.failing.clear()
    world.restart()
    await world.locator.deleted.release_leftovers(datetime.now(UTC))

    assert world.provider.held == []


async def test_the_copy_of_a_journal_is_deleted_with_its_run_and_no_other(
    world: World, tmp_path: Path
) -> None:
    ended, other = await world.begin(0), "other:train:0"
    files = [tmp_path / "store" / FOLDER / object_key(run_id, 1) for run_id in (ended, other)]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"requests")

    await world.runs.finish_session("s", "success", None)

    assert [file.exists() for file in files] == [False, True]


async def test_deferred_requests_are_deleted_with_their_session_and_no_others(
    world: World,
) -> None:
    run_id = await world.begin(0)
    await world.sample_from(None, 1)
    current = str(SamplingSessionId.of_current_weights(ModelId.parse(run_id)))
    deferred, other = world.checkpoints.deferred, "other:train:0"
    for target in (run_id, current, "s:sample:1", other):
        await deferred.add(Deferred(target, 1, "me", "/p", {}, {}, b"{}"))
    assert await world.locator.known.sampler("s:sample:1")

    await world.runs.finish_session("s", "success", None)

    assert await deferred.targets() == [other]
    assert world.locator.sampler_pending("s:sample:1").reason.endswith("was deleted")


async def test_evicted_weights_are_deleted_with_their_run_and_no_others(
    world: World, tmp_path: Path
) -> None:
    ended, other = await world.begin(0), "other:train:0"
    files = [tmp_path / "store" / evicted_prefix(run_id) / "a" for run_id in (ended, other)]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"weights")

    await world.runs.finish_session("s", "success", None)

    assert [file.exists() for file in files] == [False, True]


async def test_a_run_that_cannot_be_released_does_not_block_others(world: World) -> None:
    run_ids = [await world.begin(index) for index in range(3)]
    await world.catalog.finish_session("s", "success", None)
    world.provider.failing = {run_ids[0]}

    await world.locator.deleted.release_leftovers(datetime.now(UTC))

    assert world.provider.held == run_ids[:1]


async def test_another_server_releases_what_the_first_one_could_not(
    world: World,
) -> None:
    run_id = await world.begin(0)
    await world.locator.known.authorize_run(run_id, ME)
    await world.catalog.finish_session("s", "success", None)

    await world.locator.deleted.release_leftovers(datetime.now(UTC))

    assert world.provider.held == []
    with pytest.raises(StateLost):
        await world.locator.head_of_run(run_id)


async def test_a_run_created_while_its_session_ends_is_released_too(world: World) -> None:
    await world.runs.finish_session("s", "success", None)
    await world.begin(0)

    await world.locator.deleted.release_leftovers(datetime.now(UTC))

    assert world.provider.held == []


async def test_a_deletion_that_did_not_reach_a_head_is_repeated(world: World) -> None:
    run_id = await world.begin(0)
    world.head.models = {run_id}
    endpoint, world.provider.endpoint = world.provider.endpoint, None
    await world.runs.finish_session("s", "success", None)
    world.provider.endpoint = endpoint

    await world.locator.deleted.release_leftovers(datetime.now(UTC) + timedelta(days=1))

    assert world.head.models == set()
    assert await world.catalog.runs_to_sweep(datetime.now(UTC) + timedelta(days=1)) == []


async def test_sampling_sessions_are_removed_in_batches_without_a_lookup_for_each(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await world.begin(0)
    for index in range(100):
        await world.sample_from(run_id if index % 2 else None, index)

    async def look_up(_sampler_id: str) -> None:
        raise AssertionError

    monkeypatch.setattr(world.catalog, "sampler", look_up)
    await world.runs.finish_session("s", "success", None)

    assert sorted(world.head.released) == sorted(
        [run_id, *(f"s:sample:{index}" for index in range(100))]
    )
    assert 1 < world.head.max_concurrent_calls <= 16


async def test_a_failing_head_is_not_called_for_every_sampling_session(world: World) -> None:
    for index in range(100):
        await world.sample_from(None, index)
    world.head.is_failing = True

    await world.runs.finish_session("s", "success", None)

    assert len(world.head.released) <= 16


async def test_a_failing_head_is_not_called_for_every_run(world: World) -> None:
    for index in range(20):
        await world.begin(index)
        await world.sample_from(None, index)
    world.head.is_failing = True

    await world.runs.finish_session("s", "success", None)
    assert len(world.head.released) == 1
    await world.locator.deleted.release_leftovers(datetime.now(UTC) + timedelta(days=1))
    assert len(world.head.released) == 2

    world.head.is_failing = False
    await world.locator.deleted.release_leftovers(datetime.now(UTC) + timedelta(days=1))
    assert set(world.head.released) >= {f"s:train:{index}" for index in range(20)}


async def test_automatic_checkpoints_that_a_killed_head_has_left_are_listed_in_the_end(
    world: World, tmp_path: Path
) -> None:
    run_id = await world.begin(0)
    path = CheckpointPath.of_autosave(run_id, 3)
    manifest = CheckpointManifest(
        tinker_path=str(path),
        owner="me",
        base_model="tiny",
        lora=None,
        step=3,
        created_at=datetime.now(UTC),
        files={},
    )
    store = open_store((tmp_path / "store").as_uri())
    await store.put_async(path.manifest_key, encode_manifest(manifest))
    await world.runs.finish_session("s", "success", None)
    assert await world.checkpoints.of_run(run_id) == []

    await world.locator.deleted.release_leftovers(datetime.now(UTC) + timedelta(days=1))

    [listed] = await world.checkpoints.of_run(run_id)
    assert listed.tinker_path == str(path)


@pytest.mark.parametrize("found_by", ["the head", "the server"])
async def test_the_error_of_damaged_state_names_the_automatic_checkpoint(
    world: World, tmp_path: Path, found_by: str
) -> None:
    run_id = await world.begin(0)
    await world.catalog.set_generation(run_id, "g0", after=None)
    path = CheckpointPath.of_autosave(run_id, 3)
    manifest = CheckpointManifest(
        tinker_path=str(path),
        owner="me",
        base_model="tiny",
        lora=None,
        step=3,
        created_at=datetime.now(UTC),
        files={},
    )
    await open_store((tmp_path / "store").as_uri()).put_async(
        path.manifest_key, encode_manifest(manifest)
    )
    if found_by == "the server":
        file = tmp_path / "store" / suspended_key(run_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{")
    else:
        # The server only knows that there may be a journal.
        world.head.damage = "the record at byte 7 is damaged"
        world.provider.may_have_journals = lambda _placement: True  # type: ignore[method-assign]
    world.provider.is_loaded.set()

    with pytest.raises((InvalidRequest, StateLost)) as error:
        await world.locator.head_of_run(run_id)

    assert f"create_training_client_from_state_with_optimizer('{path}')" in str(error.value)
    [listed] = await world.checkpoints.of_run(run_id)
    assert listed.tinker_path == str(path)
