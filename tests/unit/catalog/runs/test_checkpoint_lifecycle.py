"""Listing, deleting and expiring checkpoints, even with a damaged checkpoint or a failing store."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import ObjectStore, S3Store
from sqlalchemy import Engine, event, update

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.roles import Role
from tinkercloud_api.admin.catalog_rebuild import Rebuilt, has_checkpoints, rebuild
from tinkercloud_api.catalog.access.visibility import EVERYTHING, Visibility
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Checkpoint
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.checkpoints.checkpoint_rows import latest
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_api.heads.lost_runs import lost_message
from tinkercloud_protocol.heads.checkpoint_manifest import (
    CheckpointManifest,
    SuspendedManifest,
    encode_manifest,
    suspended_key,
)
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, Unavailable
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.storage.catalogs import writing

ME = Principal(1, "key", "me", Role.USER)
PAGE = Page(0, 100)
HOUR = timedelta(hours=1)
RUN = "s:train:0"


def path(name: str, run_id: str = "s:train:0") -> CheckpointPath:
    return CheckpointPath(run_id, CheckpointKind.TRAINING, name)


def a_manifest(where: CheckpointPath, owner: str = "me", **changes: object) -> CheckpointManifest:
    fields: dict[str, object] = {
        "tinker_path": str(where),
        "owner": owner,
        "base_model": "m",
        "lora": None,
        "step": 1,
        "created_at": datetime.now(UTC),
        "files": {},
    }
    return CheckpointManifest.model_validate(fields | changes)


@dataclass
class World:
    catalog: Catalog
    store: ObjectStore
    checkpoints: Checkpoints

    async def put(self, manifest: CheckpointManifest) -> None:
        """Write a checkpoint of one file, as a head does."""
        await obstore.put_async(self.store, f"{manifest.path.prefix}/f", b"content")
        key = manifest.path.manifest_key
        await obstore.put_async(self.store, key, encode_manifest(manifest))

    async def save(self, name: str, **changes: object) -> CheckpointManifest:
        """Record a pending checkpoint, write it, and refresh the index."""
        manifest = a_manifest(path(name), **changes)  # type: ignore[arg-type]
        await self.catalog.record_pending_checkpoint(manifest.path, "me")
        await self.put(manifest)
        await self.names()
        return manifest

    async def save_of_a_newer_format(self, name: str) -> None:
        """Record a pending checkpoint, and write it in the format of a later release."""
        await self.catalog.record_pending_checkpoint(path(name), "me")
        content = encode_manifest(a_manifest(path(name)))
        newer = content.replace(b'"format_version": 3', b'"format_version": 99')
        await obstore.put_async(self.store, path(name).manifest_key, newer)

    async def age(self, name: str, by: timedelta) -> None:
        """Move the time of a save request into the past."""
        async with writing(self.catalog) as session:
            change = update(Checkpoint).where(Checkpoint.name == name)
            await session.execute(change.values(asked_at=datetime.now(UTC) - by))

    async def names(self) -> set[str]:
        infos, _total = await self.checkpoints.page(Visibility("me"), PAGE)
        return {info.checkpoint_id.partition("/")[2] for info in infos}

    async def files(self) -> set[str]:
        """Return the names of the checkpoints that have files."""
        entries = await obstore.list(self.store).collect_async()
        return {entry["path"].split("/")[-2] for entry in entries}


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[World]:
    engine = open_database(database_url)
    await migrate(engine)
    store = open_store((tmp_path / "store").as_uri())
    catalog = Catalog(engine)
    yield World(catalog, store, Checkpoints(catalog, store))
    await engine.dispose()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Keys that the store fails to read."""
    keys: set[str] = set()
    get_async = obstore.get_async

    async def get(store: ObjectStore, key: str) -> Any:
        if key in keys:
            raise PermissionDeniedError("ExpiredToken")
        return await get_async(store, key)

    monkeypatch.setattr(obstore, "get_async", get)
    return keys


async def test_an_unreadable_checkpoint_does_not_hide_others(
    world: World, refused: set[str]
) -> None:
    await world.save("good")
    await world.save_of_a_newer_format("newer")
    await world.catalog.record_pending_checkpoint(path("refused"), "me")
    refused.add(path("refused").manifest_key)

    assert await world.names() == {"good", "newer"}
    assert {info.tinker_path for info in await world.checkpoints.of_run("s:train:0")} == {
        str(path("good")),
        str(path("newer")),
    }
    await world.checkpoints.index.discover("s:train:0")


async def test_autosaves_are_hidden_until_the_run_is_lost_and_then_are_checkpoints(
    world: World,
) -> None:
    older, newer = CheckpointPath.of_autosave(RUN, 9), CheckpointPath.of_autosave(RUN, 3)
    await world.put(a_manifest(path("mine"), created_at=datetime.now(UTC) - 3 * HOUR))
    await world.put(a_manifest(older, created_at=datetime.now(UTC) - 2 * HOUR))
    await world.put(a_manifest(newer, created_at=datetime.now(UTC) - HOUR))
    await world.checkpoints.index.discover(RUN)
    assert await world.names() == {"mine"}

    message = await lost_message(world.checkpoints, RUN)

    assert f"create_training_client_from_state_with_optimizer('{newer}')" in message
    assert await world.names() == {"mine", older.name, newer.name}


async def test_an_autosave_that_a_head_may_replace_can_be_deleted_but_not_published(
    world: World,
) -> None:
    autosave = CheckpointPath.of_autosave(RUN, 1)
    await world.put(a_manifest(autosave))
    for change in (
        world.checkpoints.publish(autosave, ME, is_public=True),
        world.checkpoints.set_ttl(autosave, ME, 60),
    ):
        with pytest.raises(InvalidRequest, match=r"automatic checkpoint.* save_state"):
            await change
    assert await world.names() == set()

    await world.checkpoints.delete(autosave, ME)

    assert await world.files() == set()


async def test_a_damaged_autosave_is_not_named(world: World) -> None:
    good, damaged = CheckpointPath.of_autosave(RUN, 1), CheckpointPath.of_autosave(RUN, 2)
    await world.put(a_manifest(good))
    await obstore.put_async(world.store, damaged.manifest_key, b"{")

    assert f"('{good}')" in await lost_message(world.checkpoints, RUN)


def suspended_by(generation: str) -> bytes:
    manifest = SuspendedManifest(
        run_id=RUN,
        generation=generation,
        owner="me",
        base_model="m",
        lora=None,
        created_at=datetime.now(UTC),
        data_prefix="d",
        files={},
    )
    return encode_manifest(manifest)


async def test_autosaves_are_deleted_with_a_suspended_run_except_those_that_an_error_has_named(
    world: World,
) -> None:
    named, other = CheckpointPath.of_autosave(RUN, 1), CheckpointPath.of_autosave(RUN, 2)
    await world.put(a_manifest(named))
    await world.checkpoints.index.keep_autosaves(RUN)
    await world.put(a_manifest(other))
    await world.put(a_manifest(path("mine")))
    await obstore.put_async(world.store, suspended_key(RUN), suspended_by("g2"))

    await world.checkpoints.suspended.delete(RUN, "g2")

    assert await world.files() == {"mine", named.name}


async def test_autosaves_of_a_run_that_was_lost_after_it_was_suspended_are_kept(
    world: World,
) -> None:
    autosave = CheckpointPath.of_autosave(RUN, 1)
    await world.put(a_manifest(autosave))
    await obstore.put_async(world.store, suspended_key(RUN), suspended_by("g1"))

    await world.checkpoints.suspended.delete(RUN, "g2")

    assert await world.files() == {autosave.name}


async def test_a_folder_that_is_not_a_checkpoint_does_not_hide_others(world: World) -> None:
    found = a_manifest(path("found"))
    await world.put(found)
    folder = found.path.prefix.rpartition("/")[0]
    # Some file systems have such a snapshot folder in every folder.
    await obstore.put_async(world.store, f"{folder}/.snapshot/daily/f", b"")

    await world.checkpoints.index.discover("s:train:0")

    assert await world.names() == {"found"}


async def test_a_pending_checkpoint_of_a_newer_format_times_out_and_one_in_a_failing_store_does_not(
    world: World, refused: set[str]
) -> None:
    await world.save_of_a_newer_format("newer")
    await world.save_of_a_newer_format("later")
    await world.catalog.record_pending_checkpoint(path("refused"), "me")
    refused.add(path("refused").manifest_key)
    for name in ("newer", "refused"):
        await world.age(name, timedelta(hours=7))

    await world.checkpoints.delete_expired()

    rows = await world.catalog.unindexed_checkpoints(EVERYTHING)
    assert {row.name for row in rows} == {"later", "refused"}


async def test_checkpoints_expire_even_if_one_of_them_is_unreadable(
    world: World, refused: set[str]
) -> None:
    past = datetime.now(UTC) - HOUR
    for name in ("a", "b", "c"):
        await world.save(name, expires_at=past)
    refused.add(path("a").manifest_key)

    await world.checkpoints.delete_expired()
    assert await world.files() == {"a"}

    refused.clear()
    await world.checkpoints.delete_expired()
    assert await world.files() == set()


class Died(Exception):
    """Simulates the death of a server."""


@pytest.mark.parametrize("last", ["delete", "delete_folder"])
async def test_an_interrupted_deletion_is_completed_by_housekeeping(
    world: World, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    await world.save("a")
    do = getattr(ObjectStoreClient, last)

    async def die_after(objects: ObjectStoreClient, where: str) -> None:
        await do(objects, where)
        raise Died

    with monkeypatch.context() as dying:
        dying.setattr(ObjectStoreClient, last, die_after)
        with pytest.raises(Died):
            await world.checkpoints.delete(path("a"), ME)
    assert await world.names() == set()

    await world.checkpoints.delete_expired()

    assert await world.files() == set()
    assert await world.catalog.checkpoint(path("a")) is None


async def test_the_owner_can_delete_the_rest_of_an_interrupted_deletion(world: World) -> None:
    await world.save("a")
    await obstore.delete_async(world.store, path("a").manifest_key)

    with pytest.raises(NotFound):
        await world.checkpoints.delete(path("a"), Principal(2, "key", "you", Role.USER))
    await world.checkpoints.delete(path("a"), ME)

    assert await world.names() == await world.files() == set()
    with pytest.raises(NotFound):
        await world.checkpoints.delete(path("a"), ME)


async def test_who_may_read_a_checkpoint_learns_of_it_by_a_path_of_another_kind(
    world: World,
) -> None:
    await world.save("a")
    await world.checkpoints.index.refresh(await world.catalog.unindexed_checkpoints(EVERYTHING))
    wrong = replace(path("a"), kind=CheckpointKind.SAMPLER)

    with pytest.raises(NotFound) as mine:
        await world.checkpoints.manifest(wrong, ME)
    with pytest.raises(NotFound) as yours:
        await world.checkpoints.manifest(wrong, Principal(2, "key", "you", Role.USER))

    assert mine.value.message.endswith(f"; there is {path('a')}")
    assert str(path("a")) not in yours.value.message


async def test_a_checkpoint_cannot_be_deleted_while_it_is_being_saved(
    world: World,
) -> None:
    await world.catalog.record_pending_checkpoint(path("a"), "me")
    await obstore.put_async(world.store, f"{path('a').prefix}/f", b"content")

    with pytest.raises(NotFound):
        await world.checkpoints.delete(path("a"), ME)

    assert await world.files() == {"a"}


async def test_a_checkpoint_can_be_deleted_concurrently(world: World) -> None:
    await world.save("a")
    for index in range(50):
        await obstore.put_async(world.store, f"{path('a').prefix}/{index}", b"content")

    deletions = [world.checkpoints.delete(path("a"), ME) for _ in range(2)]
    answers = await asyncio.gather(*deletions, return_exceptions=True)

    assert {type(answer) for answer in answers} <= {type(None), NotFound}
    assert await world.names() == await world.files() == set()


async def test_a_failure_of_the_store_is_reported_as_unavailable(world: World) -> None:
    away = S3Store(
        "bucket",
        endpoint=f"http://127.0.0.1:{free_port()}",
        region="r",
        access_key_id="x",
        secret_access_key="x",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    checkpoints = Checkpoints(world.catalog, away)
    await world.save("a")

    for attempt in (
        checkpoints.ping(),
        checkpoints.manifest(path("a"), ME),
        checkpoints.delete(path("a"), ME),
        checkpoints.set_ttl(path("a"), ME, 60),
        checkpoints.suspended.has("s:train:0", "g1", None),
        checkpoints.suspended.delete("s:train:0", "g1"),
        checkpoints.index.discover("s:train:0"),
    ):
        with pytest.raises(Unavailable, match="object store"):
            await attempt
    assert suspended_key("s:train:0") not in await world.files()
    assert len(await checkpoints.of_run("s:train:0")) == 1


async def test_setting_an_expiry_does_not_change_the_manifest(world: World) -> None:
    old = await world.save("a")
    key = old.path.manifest_key
    before = (await obstore.head_async(world.store, key))["e_tag"]

    await world.checkpoints.set_ttl(path("a"), ME, 3600)

    (info,) = await world.checkpoints.of_run("s:train:0")
    assert info.expires_at is not None
    assert (await obstore.head_async(world.store, key))["e_tag"] == before


async def test_an_expiry_that_is_set_overrides_the_saved_one(world: World) -> None:
    soon = datetime.now(UTC) + timedelta(milliseconds=1)
    for name in ("longer", "never"):
        await world.put(a_manifest(path(name), expires_at=soon))
    await world.save("shorter", expires_at=soon + HOUR)
    await world.checkpoints.set_ttl(path("longer"), ME, 3600)
    await world.checkpoints.set_ttl(path("never"), ME, None)
    await world.checkpoints.set_ttl(path("shorter"), ME, 0)
    # A repeated save that the head rejects, as the name is taken, changes nothing.
    await world.catalog.record_pending_checkpoint(path("never"), "me")
    await world.age("never", timedelta(hours=7))

    await world.checkpoints.delete_expired()

    assert await world.names() == await world.files() == {"longer", "never"}
    assert (await world.checkpoints.manifest(path("never"), ME)).expires_at is None
    with pytest.raises(NotFound):
        await world.checkpoints.manifest(path("shorter"), ME)


async def test_a_checkpoint_that_replaces_an_expired_one_is_kept(world: World) -> None:
    await world.save("a", expires_at=datetime.now(UTC) - HOUR)
    await world.catalog.record_pending_checkpoint(path("a"), "me")

    await world.checkpoints.delete_expired()
    assert await world.files() == {"a"}
    await world.put(a_manifest(path("a")))
    await world.checkpoints.delete_expired()

    assert await world.names() == await world.files() == {"a"}


async def test_a_checkpoint_deleted_while_its_manifest_is_read_is_not_listed_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.catalog.record_pending_checkpoint(path("a"), "me")
    await world.put(a_manifest(path("a")))
    read = ObjectStoreClient.read

    async def read_and_delete(objects: ObjectStoreClient, key: str) -> bytes | None:
        content = await read(objects, key)
        with monkeypatch.context() as undone:
            undone.setattr(ObjectStoreClient, "read", read)
            await world.checkpoints.delete(path("a"), ME)
        return content

    monkeypatch.setattr(ObjectStoreClient, "read", read_and_delete)
    assert await world.names() == set()
    monkeypatch.undo()

    assert await world.names() == set()


@pytest.fixture
def looked_at(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys that were read, in order; no more than 16 are read at a time."""
    read, keys, reading = ObjectStoreClient.read, list[str](), set[str]()

    async def counted(objects: ObjectStoreClient, key: str) -> bytes | None:
        keys.append(key)
        reading.add(key)
        assert len(reading) <= 16
        try:
            return await read(objects, key)
        finally:
            reading.discard(key)

    monkeypatch.setattr(ObjectStoreClient, "read", counted)
    return keys


async def test_listing_runs_reads_each_pending_manifest_once(
    world: World, looked_at: list[str]
) -> None:
    mine = [path(f"n{index}", f"s:train:{index % 5}") for index in range(50)]
    for wanted in [*mine, path("x", "other:train:0")]:
        await world.catalog.record_pending_checkpoint(wanted, "me")

    listed = await world.checkpoints.of_runs([f"s:train:{index}" for index in range(5)])

    assert sorted(looked_at) == sorted(wanted.manifest_key for wanted in mine)
    assert listed == {f"s:train:{index}": [] for index in range(5)}


async def test_listing_own_checkpoints_reads_no_manifests_of_other_owners(
    world: World, looked_at: list[str]
) -> None:
    await world.catalog.record_pending_checkpoint(path("mine"), "me")
    await world.catalog.record_pending_checkpoint(path("yours", "other:train:0"), "you")

    await world.names()

    assert looked_at == [path("mine").manifest_key]


async def test_a_damaged_manifest_is_rejected_with_a_reason(world: World) -> None:
    await world.save_of_a_newer_format("newer")

    with pytest.raises(InvalidRequest, match="has version 99"):
        await world.checkpoints.manifest(path("newer"), ME)


async def ask(world: World, name: str, status: int | None) -> None:
    """Send a save request to a head that responds with this status."""

    async def answer() -> int | None:
        return status

    await world.checkpoints.record_pending_unless_rejected(path(name), "me", answer)


async def waiting(world: World) -> set[str]:
    """Return the names of the pending checkpoints."""
    return {row.name for row in await world.catalog.unindexed_checkpoints(EVERYTHING)}


async def test_a_save_that_the_head_rejects_at_once_leaves_no_pending_checkpoint(
    world: World,
) -> None:
    await world.save("kept")

    for status in (400, 404, 410, 413, 429):
        await ask(world, "refused", status)
        await ask(world, "kept", status)
    await ask(world, "taken", 200)
    await ask(world, "unknown", 503)
    await ask(world, "died", None)

    assert await waiting(world) == {"taken", "unknown", "died"}
    assert await world.names() == {"kept"}


async def test_a_rejected_save_does_not_affect_an_accepted_save_of_the_same_name(
    world: World,
) -> None:
    await ask(world, "before", 200)
    await ask(world, "before", 400)

    async def another_is_accepted_meanwhile() -> int:
        await ask(world, "meanwhile", 200)
        return 400

    await world.checkpoints.record_pending_unless_rejected(
        path("meanwhile"), "me", another_is_accepted_meanwhile
    )

    assert await waiting(world) == {"before", "meanwhile"}
    for name in ("before", "meanwhile"):
        await world.put(a_manifest(path(name)))
    assert await world.names() == {"before", "meanwhile"}


async def test_manifests_of_thousands_of_failed_saves_are_not_looked_for(
    world: World, looked_at: list[str]
) -> None:
    for index in range(30):
        await world.catalog.record_pending_checkpoint(path(f"failed-{index}"), "me")
    await world.catalog.record_pending_checkpoint(path("saved"), "me")
    await world.put(a_manifest(path("saved")))

    assert await world.names() == {"saved"}

    assert looked_at == [path("saved").manifest_key]
    await world.age("failed-1", timedelta(hours=7))
    await world.names()
    assert "failed-1" not in await waiting(world)
    assert len(await waiting(world)) == 29


async def test_a_checkpoint_that_an_admin_saves_belongs_to_the_owner_of_its_run(
    world: World,
) -> None:
    await world.catalog.record_pending_checkpoint(path("a"), "admin")
    await world.put(a_manifest(path("a"), owner="me"))
    await world.checkpoints.page(Visibility("admin"), PAGE)

    assert await world.names() == {"a"}
    assert await world.checkpoints.page(Visibility("admin"), PAGE) == ([], 0)


async def test_folders_of_deleted_checkpoints_are_removed(world: World, tmp_path: Path) -> None:
    await world.save("a")
    await world.save("b")

    await world.checkpoints.delete(path("a"), ME)
    assert await world.names() == {"b"}
    await world.checkpoints.delete(path("b"), ME)

    assert list((tmp_path / "store").iterdir()) == []


async def test_an_unreadable_checkpoint_is_listed_with_the_reason_until_it_is_deleted(
    world: World,
) -> None:
    await world.save("older")
    await world.save_of_a_newer_format("newer")
    for _ in range(2):
        infos = {info.checkpoint_id: info for info in await world.checkpoints.of_run("s:train:0")}
        assert set(infos) == {"weights/older", "weights/newer"}
        assert infos["weights/older"].damage is None
        assert "its manifest.json has version 99" in (infos["weights/newer"].damage or "")
        best = latest(list(infos.values()), CheckpointKind.TRAINING)
        assert best is not None
        assert best.checkpoint_id == "weights/older"
        await world.age("newer", timedelta(hours=7))
    assert await waiting(world) == set()

    with pytest.raises(NotFound):
        await world.checkpoints.delete(path("newer"), Principal(2, "key", "you", Role.USER))
    await world.checkpoints.delete(path("newer"), ME)

    assert await world.names() == await world.files() == {"older"}


async def test_a_checkpoint_that_replaces_a_damaged_one_is_listed_as_intact(
    world: World,
) -> None:
    await world.save_of_a_newer_format("a")
    await world.names()

    await world.save("a")

    (info,) = await world.checkpoints.of_run("s:train:0")
    assert info.damage is None
    assert info.time is not None


async def test_a_lost_catalog_is_rebuilt_and_an_intact_one_is_unchanged(
    world: World,
) -> None:
    objects = ObjectStoreClient(world.store)
    assert await rebuild(world.catalog, objects) == Rebuilt()
    assert not await has_checkpoints(objects)
    adapter = LoraConfig(rank=4)
    for name, where in {"a": "s:train:0", "b": "s:train:1"}.items():
        await world.put(a_manifest(path(name, where), lora=adapter, base_model="m"))
    await obstore.put_async(world.store, path("bad").manifest_key, b"{}")
    await obstore.put_async(world.store, "runs/else/weights/x/manifest.json", b"{}")
    assert await world.catalog.is_empty()
    assert await has_checkpoints(objects)

    rebuilt = Rebuilt()
    assert await rebuild(world.catalog, objects, rebuilt) is rebuilt
    await world.checkpoints.set_ttl(path("a"), ME, 3600)
    assert await rebuild(world.catalog, objects) == rebuilt

    assert (rebuilt.folders, rebuilt.runs) == (3, 2)
    assert (rebuilt.checkpoints, len(rebuilt.damaged)) == (2, 2)
    assert await world.names() == {"a", "b", "bad"}
    (kept,) = [info for info in await world.checkpoints.of_run("s:train:0") if not info.damage]
    assert kept.expires_at is not None
    runs, total = await world.catalog.runs(Visibility("me"), PAGE)
    assert total == 2
    assert {(run.owner, run.base_model, run.spec["lora"]["rank"]) for run in runs} == {
        ("me", "m", 4)
    }


async def test_a_rebuilt_catalog_lists_autosaves_of_lost_runs_only(world: World) -> None:
    suspended, lost = "s:train:0", "s:train:1"
    for run_id in (suspended, lost):
        autosave = CheckpointPath.of_autosave(run_id, 1)
        await world.put(a_manifest(autosave, created_at=datetime.now(UTC) - HOUR))
    await obstore.put_async(world.store, suspended_key(suspended), suspended_by("g1"))

    await rebuild(world.catalog, ObjectStoreClient(world.store))

    assert await world.checkpoints.of_run(suspended) == []
    (info,) = await world.checkpoints.of_run(lost)
    assert info.tinker_path == str(CheckpointPath.of_autosave(lost, 1))
    row = await world.catalog.run(suspended)
    assert row is not None
    assert row.generation == "g1"


async def test_checkpoints_that_are_known_cost_one_query_together(world: World) -> None:
    for name in ("a", "b", "c"):
        await world.put(a_manifest(path(name)))
    await world.checkpoints.index.discover(RUN)
    statements = list[str]()

    def note(_db: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        await world.checkpoints.index.discover(RUN)
    finally:
        event.remove(Engine, "before_cursor_execute", note)

    assert await world.names() == {"a", "b", "c"}
    assert len(statements) == 1
