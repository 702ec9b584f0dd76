"""Checkpoints in a folder and in S3: whole or absent, wherever the writer dies."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import ObjectStore

from tinkercloud_protocol.checkpoints import Manifest
from tinkercloud_protocol.errors import InvalidRequest, NotFound
from tinkercloud_protocol.paths import CheckpointKind, CheckpointPath
from tinkercloud_protocol.training import LoraConfig
from tinkercloud_worker.checkpoints import store as store_module
from tinkercloud_worker.checkpoints.store import CheckpointStore, open_store

PATH = CheckpointPath("s:train:0", CheckpointKind.TRAINING, "step-1")
OLD = {"a.bin": b"old a", "b.bin": b"old b", "dropped.bin": b"old only"}
NEW = {"a.bin": b"new a!", "b.bin": b"new b!", "added.bin": b"new only"}


def a_manifest(note: str = "old", **changes: object) -> Manifest:
    fields = {
        "tinker_path": str(PATH),
        "owner": "me",
        "base_model": "tiny",
        "lora": LoraConfig(rank=4),
        "step": 1,
        "created_at": datetime(2026, 1, 1, tzinfo=UTC),
        "user_metadata": {"note": note},
        "files": {},
    }
    return Manifest.model_validate({**fields, **changes})


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Run an S3 server and return the URL of a bucket in it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
    }
    saved = dict(os.environ)
    os.environ.update(environment)
    boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT"]).create_bucket(Bucket="ckpt")
    yield "s3://ckpt/root"
    server.stop()
    os.environ.clear()
    os.environ.update(saved)


@pytest.fixture(params=["file", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """Return an empty object store; the URL is all that differs."""
    if request.param == "file":
        return open_store((tmp_path / "new" / "folder").as_uri())
    url = f"{request.getfixturevalue('s3')}/{tmp_path.name}"
    return open_store(url)


async def test_what_was_written_is_read_back(objects: ObjectStore) -> None:
    store = CheckpointStore(objects)

    written = await store.write(a_manifest(), OLD, overwrite=False)
    manifest, files = await store.read(PATH)

    assert manifest == written
    assert files == OLD
    assert manifest.size_bytes == sum(map(len, OLD.values()))
    assert manifest.data_prefix == ""


async def test_a_taken_name_is_refused_unless_overwriting_is_asked_for(
    objects: ObjectStore,
) -> None:
    store = CheckpointStore(objects)
    await store.write(a_manifest(), OLD, overwrite=False)

    with pytest.raises(InvalidRequest, match="exists already"):
        await store.write(a_manifest("new"), NEW, overwrite=False)
    assert (await store.read(PATH))[1] == OLD
    await store.write(a_manifest("new"), NEW, overwrite=True)

    manifest, files = await store.read(PATH)
    assert files == NEW
    assert manifest.user_metadata == {"note": "new"}
    listed = [entry["path"] async for batch in obstore.list(objects) for entry in batch]
    assert sorted(listed) == sorted([PATH.manifest_key, *[f"{PATH.prefix}/{name}" for name in NEW]])


class Death(Exception):
    """Stands for the end of the process."""


class DyingObstore:
    """The obstore module, until a number of writes have been made."""

    def __init__(self, writes_until_death: int) -> None:
        self.left = writes_until_death

    def __getattr__(self, name: str) -> Any:
        function = getattr(obstore, name)
        if name not in {"put_async", "copy_async", "delete_async"}:
            return function

        async def write(*arguments: object, **keywords: object) -> object:
            if self.left == 0:
                raise Death
            self.left -= 1
            return await function(*arguments, **keywords)

        return write


async def write_until_death(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, writes: int, *, overwrite: bool
) -> bool:
    """Write the new checkpoint, dying after so many writes; return whether it got through."""
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "obstore", DyingObstore(writes))
        try:
            await CheckpointStore(objects).write(a_manifest("new"), NEW, overwrite=overwrite)
        except Death:
            return False
    return True


async def test_a_writer_that_dies_leaves_no_checkpoint_or_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for writes in range(20):
        objects = open_store((tmp_path / str(writes)).as_uri())
        got_through = await write_until_death(objects, monkeypatch, writes, overwrite=False)

        store = CheckpointStore(objects)
        exists = await store.find(PATH) is not None
        seen.add(exists)
        if exists:
            assert (await store.read(PATH))[1] == NEW
        else:
            await store.write(a_manifest("again"), NEW, overwrite=False)
            assert (await store.read(PATH))[1] == NEW
        if got_through:
            break
    assert seen == {True, False}


async def test_an_overwriter_that_dies_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for writes in range(30):
        objects = open_store((tmp_path / str(writes)).as_uri())
        store = CheckpointStore(objects)
        await store.write(a_manifest(), OLD, overwrite=False)
        got_through = await write_until_death(objects, monkeypatch, writes, overwrite=True)

        manifest, files = await store.read(PATH)
        is_new = manifest.user_metadata == {"note": "new"}
        assert is_new or manifest.user_metadata == {"note": "old"}
        assert files == (NEW if is_new else OLD)
        seen.append(is_new)
        await store.write(a_manifest("last"), OLD, overwrite=True)
        assert (await store.read(PATH))[1] == OLD
        listed = [entry["path"] async for batch in obstore.list(objects) for entry in batch]
        assert len(listed) == 1 + len(OLD)
        if got_through:
            break
    assert seen == sorted(seen)
    assert set(seen) == {False, True}


async def test_damage_is_noticed(objects: ObjectStore) -> None:
    store = CheckpointStore(objects)
    await store.write(a_manifest(), OLD, overwrite=False)
    await obstore.put_async(objects, f"{PATH.prefix}/a.bin", b"bad a")

    with pytest.raises(InvalidRequest, match=r"a\.bin is damaged"):
        await store.read(PATH)
    await obstore.delete_async(objects, f"{PATH.prefix}/b.bin")
    with pytest.raises(InvalidRequest, match=r"b\.bin is missing"):
        await store.read(PATH, ["b.bin"])
    assert (await store.read(PATH, ["dropped.bin"]))[1] == {"dropped.bin": b"old only"}


async def test_a_manifest_of_a_newer_format_is_refused(objects: ObjectStore) -> None:
    content = a_manifest().model_dump_json().replace('"format_version":1', '"format_version":2')
    await obstore.put_async(objects, PATH.manifest_key, content.encode())

    with pytest.raises(InvalidRequest, match="newer format"):
        await CheckpointStore(objects).read(PATH)


async def test_what_has_expired_does_not_exist(objects: ObjectStore) -> None:
    store = CheckpointStore(objects)
    past = datetime.now(UTC) - timedelta(seconds=1)

    await store.write(a_manifest(expires_at=past), OLD, overwrite=False)

    with pytest.raises(NotFound):
        await store.read(PATH)
    with pytest.raises(NotFound):
        await store.manifest(CheckpointPath(PATH.run_id, PATH.kind, "never"))
