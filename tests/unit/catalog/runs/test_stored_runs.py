"""Copies and uploads while something fails: abandoned, repeated, and with a changing source."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import obstore
import pytest
from obstore.store import ObjectStore
from sqlalchemy import update

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.project_rights import Projects
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Upload
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.providers.head_http_client import open_client
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_api.transfers.copies import Copies, CopyWeightsRequest
from tinkercloud_api.transfers.imports import Imports, StartUpload
from tinkercloud_api.transfers.stored_runs import StoredRuns
from tinkercloud_protocol.heads.checkpoint_manifest import (
    CheckpointManifest,
    StoredFile,
    encode_manifest,
)
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.storage.catalogs import writing

ME = Principal(1, "key", "me", Role.USER)
SOURCE = CheckpointPath("s:train:0", CheckpointKind.TRAINING, "a")
CONTENT = {"model.safetensors": b"weights", "optimizer.safetensors": b"moments"}
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
QUOTA = 10_000


def an_adapter() -> bytes:
    """Return a safetensors file of an adapter of rank 1."""
    entries = {
        f"model.layers.0.q_proj.lora_{half}.weight": {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [index * 8, index * 8 + 8],
        }
        for index, (half, shape) in enumerate([("A", [1, 2]), ("B", [2, 1])])
    }
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * 16


ADAPTER = an_adapter()
START = StartUpload(base_model="tiny", adapter_config=CONFIG, size_bytes=len(ADAPTER))


async def sent(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@dataclass
class World:
    catalog: Catalog
    store: ObjectStore
    checkpoints: Checkpoints
    stored_runs: StoredRuns
    copies: Copies
    imports: Imports

    async def save(self, files: dict[str, bytes] = CONTENT) -> CheckpointManifest:
        """Write the source checkpoint, as a head does."""
        manifest = CheckpointManifest(
            tinker_path=str(SOURCE),
            owner="me",
            base_model="tiny",
            lora=None,
            step=1,
            created_at=datetime.now(UTC),
            files={
                name: StoredFile(
                    size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
                )
                for name, content in files.items()
            },
        )
        for name, content in files.items():
            await obstore.put_async(self.store, manifest.key_of(name), content)
        await obstore.put_async(self.store, SOURCE.manifest_key, encode_manifest(manifest))
        await self.catalog.record_pending_checkpoint(SOURCE, "me")
        return manifest

    async def copy(self, key: str | None = None) -> str:
        request = CopyWeightsRequest(source_path=str(SOURCE))
        return await self.copies.copy(request, key, ME, ME)

    async def copy_to(self, run: str) -> str:
        """Copy to a run of a known id, as a repeated request does."""
        manifest = await self.checkpoints.manifest(SOURCE, ME)
        return await self.copies._copy(
            manifest, CopyWeightsRequest(source_path=str(SOURCE)), run, "me"
        )

    async def paths(self) -> set[str]:
        infos, _ = await self.checkpoints.page(Visibility("me"), Page(0, 100))
        return {info.tinker_path for info in infos}

    async def keys(self) -> set[str]:
        """Return the keys of all objects, apart from those of the source."""
        entries = await obstore.list(self.store).collect_async()
        return {e["path"] for e in entries if not e["path"].startswith(SOURCE.prefix)}

    async def expire(self) -> None:
        """Move the expiry of all uploads into the past."""
        async with writing(self.catalog) as db:
            await db.execute(update(Upload).values(expires_at=datetime.now(UTC) - timedelta(1)))


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[World]:
    engine = open_database(database_url)
    await migrate(engine)
    store = open_store((tmp_path / "store").as_uri())
    catalog, client = Catalog(engine), open_client()
    checkpoints, provider = Checkpoints(catalog, store), OneHead()
    locator = HeadLocator(catalog, checkpoints, provider, client)
    runs = TrainingRuns(catalog, provider, checkpoints, locator)
    stored_runs = StoredRuns(catalog, checkpoints, ObjectStoreClient(store), QUOTA)
    imports = Imports(catalog, runs, stored_runs, Projects(catalog), 1 << 20)
    copies = Copies(checkpoints, runs, stored_runs, Projects(catalog))
    yield World(catalog, store, checkpoints, stored_runs, copies, imports)
    await client.close()
    await engine.dispose()


async def test_concurrent_copies_with_one_key_make_one_copy(world: World) -> None:
    await world.save()

    paths = set(await asyncio.gather(*[world.copy("key") for _ in range(8)]))

    assert await world.paths() == {str(SOURCE), *paths}
    assert len(paths) == 1
    assert len(await world.keys()) == len(CONTENT) + 1


async def test_a_copy_of_a_checkpoint_that_is_overwritten_meanwhile_fails_and_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.save()
    copy = world.stored_runs.objects.copy

    async def overwriting(key: str, target: str, size_bytes: int) -> None:
        await copy(key, target, size_bytes)
        await world.save({"model.safetensors": b"other"})

    monkeypatch.setattr(ObjectStoreClient, "copy", lambda _self, *args: overwriting(*args))
    with pytest.raises(Unavailable, match="was overwritten or deleted while it was copied"):
        await world.copy("key")

    assert await world.keys() == set()
    assert await world.paths() == {str(SOURCE)}
    monkeypatch.undo()
    path = await world.copy("key")
    manifest = await world.checkpoints.manifest(CheckpointPath.parse(path), ME)
    assert list(manifest.files) == ["model.safetensors"]


async def test_a_missing_file_of_the_source_is_no_copy(world: World) -> None:
    manifest = await world.save()
    await obstore.delete_async(world.store, manifest.key_of("model.safetensors"))

    with pytest.raises(Unavailable):
        await world.copy()

    assert await world.keys() == set()


async def test_a_copy_whose_process_died_is_swept_or_repeated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.save()

    async def die(*_args: object) -> str:
        raise SystemExit

    for key in ("swept", "repeated"):
        monkeypatch.setattr(StoredRuns, "complete", die)
        with pytest.raises(SystemExit):
            await world.copy_to(f"{key}:train:0")
        monkeypatch.undo()
    assert await world.paths() == {str(SOURCE)}
    repeated = await world.copy_to("repeated:train:0")
    await world.expire()
    await world.stored_runs.sweep()

    assert await world.paths() == {str(SOURCE), repeated}
    assert {key.split("/")[1] for key in await world.keys()} == {"repeated:train:0"}
    assert len(await world.keys()) == len(CONTENT) + 1


async def test_a_copy_beyond_the_quota_is_rejected(world: World) -> None:
    await world.save({"model.safetensors": b"x" * (QUOTA // 2 + 1)})

    with pytest.raises(InvalidRequest, match="max_checkpoint_bytes_per_owner"):
        await world.copy()

    assert await world.keys() == set()


async def test_unfinished_uploads_count_towards_the_quota_and_are_few(world: World) -> None:
    large = START.model_copy(update={"size_bytes": QUOTA // 2 + 1})
    await world.imports.start(large, ME)

    with pytest.raises(InvalidRequest, match="max_checkpoint_bytes_per_owner"):
        await world.imports.start(large, ME)
    for _ in range(3):
        await world.imports.start(START, ME)
    with pytest.raises(Overloaded, match="unfinished uploads"):
        await world.imports.start(START, ME)
    await world.expire()
    await world.imports.start(large, ME)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 100, 10_000])
async def test_a_file_may_arrive_in_parts_of_any_size(world: World, size: int) -> None:
    upload = await world.imports.start(START, ME)
    parts = [ADAPTER[start : start + size] for start in range(0, len(ADAPTER), size)]

    await world.imports.receive(upload.id, ME, sent(parts), None)
    path = await world.imports.finish(upload.id, ME)

    manifest = await world.checkpoints.manifest(CheckpointPath.parse(path), ME)
    stored = manifest.files["adapter_model.safetensors"]
    result = await obstore.get_async(world.store, manifest.key_of("adapter_model.safetensors"))
    assert bytes(await result.bytes_async()) == ADAPTER
    assert stored.sha256 == hashlib.sha256(ADAPTER).hexdigest()
    assert await world.imports.finish(upload.id, ME) == path


async def test_a_file_that_is_sent_twice_is_stored_once(world: World) -> None:
    upload = await world.imports.start(START, ME)

    for _ in range(2):
        await world.imports.receive(upload.id, ME, sent([ADAPTER]), None)
    await world.imports.finish(upload.id, ME)

    assert len(await world.keys()) == 3


async def test_a_file_that_arrives_twice_at_once_is_rejected(world: World) -> None:
    upload = await world.imports.start(START, ME)
    is_receiving, rest = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield ADAPTER[:20]
        is_receiving.set()
        await rest.wait()
        yield ADAPTER[20:]

    first = asyncio.create_task(world.imports.receive(upload.id, ME, slow(), None))
    await is_receiving.wait()
    with pytest.raises(InvalidRequest, match="its file is being received"):
        await world.imports.receive(upload.id, ME, sent([ADAPTER]), None)
    rest.set()
    await first

    assert await world.imports.finish(upload.id, ME) in await world.paths()


async def test_an_abandoned_upload_is_swept(world: World) -> None:
    upload = await world.imports.start(START, ME)
    await world.imports.receive(upload.id, ME, sent([ADAPTER]), None)
    assert await world.keys()

    await world.expire()
    for attempt in (
        world.imports.finish(upload.id, ME),
        world.imports.receive(upload.id, ME, sent([ADAPTER]), None),
    ):
        with pytest.raises(InvalidRequest, match="has expired"):
            await attempt
    await world.stored_runs.sweep()

    assert await world.keys() == set()
    with pytest.raises(NotFound):
        await world.imports.finish(upload.id, ME)


async def test_a_finished_upload_outlives_its_row(world: World) -> None:
    upload = await world.imports.start(START, ME)
    await world.imports.receive(upload.id, ME, sent([ADAPTER]), None)
    path = await world.imports.finish(upload.id, ME)

    await world.expire()
    await world.stored_runs.sweep()

    assert await world.paths() == {path}
    assert len(await world.keys()) == 3
    assert await world.catalog.upload(upload.id) is None


@pytest.mark.parametrize("value", ["a\0b", 10**30, "\ud800"])
async def test_values_that_databases_cannot_store_are_rejected(world: World, value: object) -> None:
    request = START.model_copy(update={"adapter_config": {**CONFIG, "revision": value}})

    with pytest.raises(InvalidRequest, match=r"^adapter_config: "):
        await world.imports.start(request, ME)


async def test_a_number_that_json_does_not_have_is_stored_as_null(world: World) -> None:
    config = {**CONFIG, "lora_dropout": float("nan")}

    upload = await world.imports.start(START.model_copy(update={"adapter_config": config}), ME)

    assert upload.adapter_config["lora_dropout"] is None
