"""Checkpoints in a folder and in S3 are complete or absent, wherever the writer dies."""

import asyncio
import hashlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import obstore
import orjson
import pytest
from moto.server import ThreadedMotoServer
from obstore.exceptions import (
    GenericError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, MemoryStore, ObjectStore

from tinkercloud_protocol.heads.checkpoint_manifest import (
    CheckpointManifest,
    StoredFile,
    SuspendedManifest,
    encode_manifest,
)
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.heads.releases import this_release
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath
from tinkercloud_testing.storage.dying_store import Death, DyingObstore
from tinkercloud_worker.checkpoints import durable, tensor_file, upload_parts
from tinkercloud_worker.checkpoints import store as store_module
from tinkercloud_worker.checkpoints.store import CheckpointStore, StoreFailed

PATH = CheckpointPath("s:train:0", CheckpointKind.TRAINING, "step-1")
OLD = {"a.bin": b"old a", "b.bin": b"old b", "dropped.bin": b"old only"}
NEW = {"a.bin": b"new a!", "b.bin": b"new b!", "added.bin": b"new only"}


def a_manifest(note: str = "old", **changes: object) -> CheckpointManifest:
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
    return CheckpointManifest.model_validate({**fields, **changes})


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
    """Return an empty object store; stores differ by URL only."""
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


async def test_an_existing_name_is_rejected_unless_overwrite_is_set(
    objects: ObjectStore,
) -> None:
    store = CheckpointStore(objects)
    await store.write(a_manifest(), OLD, overwrite=False)

    with pytest.raises(InvalidRequest, match="already exists"):
        await store.write(a_manifest("new"), NEW, overwrite=False)
    assert (await store.read(PATH))[1] == OLD
    await store.write(a_manifest("new"), NEW, overwrite=True)

    manifest, files = await store.read(PATH)
    assert files == NEW
    assert manifest.user_metadata == {"note": "new"}
    listed = [entry["path"] async for batch in obstore.list(objects) for entry in batch]
    assert sorted(listed) == sorted([PATH.manifest_key, *[f"{PATH.prefix}/{name}" for name in NEW]])


@pytest.mark.parametrize("scheme", ["s3", "az", "gs"])
async def test_a_store_without_a_custom_endpoint_uses_https_only(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
        "AZURE_STORAGE_ACCOUNT_NAME": "x",
        "AZURE_STORAGE_ACCOUNT_KEY": "eA==",
        "GOOGLE_SKIP_SIGNATURE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    objects = open_store(f"{scheme}://bucket/root")
    assert not isinstance(objects, LocalStore | MemoryStore)

    assert objects.client_options is not None
    assert str(objects.client_options["allow_http"]).lower() == "false"


async def write_until_death(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, writes: int, *, overwrite: bool
) -> bool:
    """Write the new checkpoint, dying after some writes; return whether it completed."""
    with monkeypatch.context() as patch:
        dying = DyingObstore(writes)
        patch.setattr(store_module, "obstore", dying)
        patch.setattr(durable, "obstore", dying)
        try:
            await CheckpointStore(objects).write(a_manifest("new"), NEW, overwrite=overwrite)
        except Death:
            return False
    return True


async def test_a_writer_that_dies_leaves_a_complete_checkpoint_or_none(
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


async def test_overwriting_that_dies_leaves_the_old_checkpoint_or_the_new_one(
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


async def recorded(
    store: CheckpointStore, root: Path, monkeypatch: pytest.MonkeyPatch, *, overwrite: bool
) -> list[tuple[str, str]]:
    """Write the new checkpoint; return which names were renamed and synchronized, in order."""
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, obstore.rename_async

    def recording_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append(("fsync", str(path.relative_to(root))))

    async def recording_rename(objects: ObjectStore, old: str, new: str, **options: Any) -> None:
        await rename(objects, old, new, **options)
        done.append(("rename", new))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", recording_fsync)
        patch.setattr(obstore, "rename_async", recording_rename)
        await store.write(a_manifest("new"), NEW, overwrite=overwrite)
    return done


@pytest.mark.parametrize("overwrite", [False, True])
async def test_files_are_synced_before_the_manifest_and_the_manifest_before_the_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    store = CheckpointStore(open_store(tmp_path.as_uri()))
    if overwrite:
        await store.write(a_manifest("old"), OLD, overwrite=False)

    done = await recorded(store, tmp_path, monkeypatch, overwrite=overwrite)

    folder, manifest = PATH.prefix, PATH.manifest_key
    switches = [index for index, each in enumerate(done) if each == ("rename", manifest)]
    assert len(switches) == (2 if overwrite else 1)
    folders = {".", *(str(parent) for parent in Path(manifest).parents)}
    start = 0
    for index in switches:
        before, after = done[start:index], done[index:]
        synchronized = {name for what, name in before if what == "fsync"}
        assert folders <= synchronized
        for name in NEW:
            assert any(Path(each).name == name for each in synchronized), before
        # The manifest's bytes are there before it takes its name, and the name before the answer.
        assert any(name.startswith(f"{manifest}.") for name in synchronized)
        assert ("fsync", folder) in after
        start = index + 1


async def test_a_modified_manifest_is_detected(objects: ObjectStore) -> None:
    store = CheckpointStore(objects)
    await store.write(a_manifest(), OLD, overwrite=False)
    content = bytes(await (await obstore.get_async(objects, PATH.manifest_key)).bytes_async())
    assert b'"step": 1' in content

    await obstore.put_async(objects, PATH.manifest_key, content.replace(b'"step": 1', b'"step": 4'))
    with pytest.raises(InvalidRequest, match=r"is damaged \(it differs from its checksum"):
        await store.find(PATH)
    await obstore.put_async(objects, PATH.manifest_key, b"")
    with pytest.raises(InvalidRequest, match=r"is damaged \(it is not JSON"):
        await store.find(PATH)


async def test_a_manifest_with_keys_of_a_later_release_is_read(objects: ObjectStore) -> None:
    store = CheckpointStore(objects)
    written = await store.write(a_manifest(), OLD, overwrite=False)
    content = bytes(await (await obstore.get_async(objects, PATH.manifest_key)).bytes_async())
    fields = orjson.loads(content)
    fields.pop("checksum")

    later = orjson.dumps({"new_key": 1, **fields}, option=orjson.OPT_SORT_KEYS)
    checksum = hashlib.sha256(later).hexdigest()
    await obstore.put_async(
        objects, PATH.manifest_key, orjson.dumps({"new_key": 1, **fields, "checksum": checksum})
    )
    assert await store.find(PATH) == written


async def test_errors_in_a_manifest_are_reported_without_links_to_a_library(
    objects: ObjectStore,
) -> None:
    await obstore.put_async(objects, PATH.manifest_key, b'{"step": "many"}')

    with pytest.raises(InvalidRequest) as refused:
        await CheckpointStore(objects).find(PATH)

    assert "tinker_path: Field required" in refused.value.message
    assert "http" not in refused.value.message
    with pytest.raises(ValueError, match=r"header is invalid: a\.dtype") as unread:
        tensor_file.decode(b"\x0a\0\0\0\0\0\0\0" + b'{"a":{}  }')
    assert "http" not in str(unread.value)


@pytest.mark.parametrize("damaged", [b"bad a", b"old", b"old a and more"])
async def test_damaged_files_are_detected(objects: ObjectStore, damaged: bytes) -> None:
    store = CheckpointStore(objects)
    await store.write(a_manifest(), OLD, overwrite=False)
    await obstore.put_async(objects, f"{PATH.prefix}/a.bin", damaged)

    with pytest.raises(InvalidRequest, match=r"a\.bin is damaged"):
        await store.read(PATH)
    await obstore.delete_async(objects, f"{PATH.prefix}/b.bin")
    with pytest.raises(InvalidRequest, match=r"b\.bin is missing"):
        await store.read(PATH, ["b.bin"])
    with pytest.raises(InvalidRequest, match=r"never\.bin is missing"):
        await store.read(PATH, ["never.bin"])
    assert (await store.read(PATH, ["dropped.bin"]))[1] == {"dropped.bin": b"old only"}


async def test_a_manifest_of_a_newer_format_is_rejected(objects: ObjectStore) -> None:
    content = encode_manifest(a_manifest()).replace(b'"format_version": 3', b'"format_version": 99')
    ours = f'"release": "{this_release()}"'
    content = content.replace(ours.encode(), b'"release": "9.0.0"')
    await obstore.put_async(objects, PATH.manifest_key, content)

    with pytest.raises(InvalidRequest) as refused:
        await CheckpointStore(objects).read(PATH)

    assert str(refused.value) == (
        f"{PATH} can't be read: its manifest.json has version 99 (of release 9.0.0), and release"
        f" {this_release()} reads versions 1 to 3; use release 9.0.0 or newer, or a checkpoint or"
        " backup that this release wrote"
    )


async def test_heads_do_not_check_the_expiry_of_checkpoints(
    objects: ObjectStore,
) -> None:
    store = CheckpointStore(objects)
    past = datetime.now(UTC) - timedelta(seconds=1)

    await store.write(a_manifest(expires_at=past), OLD, overwrite=False)

    assert (await store.read(PATH))[0].expires_at == past
    with pytest.raises(NotFound):
        await store.manifest(CheckpointPath(PATH.run_id, PATH.kind, "never"))


def parts_of(key: str) -> int:
    """Return the number of parts of an uploaded object, according to its ETag."""
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT"])
    tag = client.head_object(Bucket="ckpt", Key=f"root/{key}")["ETag"].strip('"')
    return int(tag.partition("-")[2] or 1)


def a_suspended_manifest(files: dict[str, StoredFile]) -> SuspendedManifest:
    return SuspendedManifest(
        run_id="s:train:0",
        generation="g1",
        owner="me",
        base_model="tiny",
        lora=None,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        data_prefix="first",
        files=files,
    )


async def test_a_large_file_is_uploaded_in_no_more_parts_than_s3_accepts(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_parts, "MOST_PARTS", 3)
    large, small = os.urandom(23 << 20), b"small"
    store = CheckpointStore(open_store(s3))

    await store.write(a_manifest(), {"large": large, "small": small}, overwrite=False)
    counts = [parts_of(f"{PATH.prefix}/{name}") for name in ("large", "small")]
    await store.write(a_manifest(), {"large": large[1:], "small": small}, overwrite=True)
    overwritten = [parts_of(f"{PATH.prefix}/{name}") for name in ("large", "small")]
    stored = await store.put_suspended(a_suspended_manifest({}), "large", large)
    suspended = a_suspended_manifest({"large": stored})

    assert counts == overwritten == [3, 1]
    assert parts_of(suspended.key_of("large")) == 3
    assert (await store.read(PATH))[1] == {"large": large[1:], "small": small}
    assert await store.read_file(suspended, "large") == large


class MeasuredObstore:
    """The obstore module, which records the size of each response."""

    def __init__(self) -> None:
        self.answers: list[int] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(obstore, name)
        if name not in {"get_async", "get_range_async"}:
            return function

        async def read(*arguments: object, **keywords: object) -> object:
            answer = await function(*arguments, **keywords)
            size = len(answer) if name == "get_range_async" else answer.meta["size"]
            self.answers.append(size)
            return answer

        return read


async def test_a_large_file_is_read_in_parts_within_the_request_timeout(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"large": os.urandom((12 << 20) + 1), "empty": b""}
    store = CheckpointStore(objects)
    manifest = await store.write(a_manifest(), files, overwrite=False)
    measured = MeasuredObstore()
    monkeypatch.setattr(store_module, "obstore", measured)

    contents = {name: await store.read_file(manifest, name) for name in files}

    assert contents == files
    assert sorted(measured.answers) == [(2 << 20) + 1, 5 << 20, 5 << 20]


class FailingObstore:
    """The obstore module, whose first request for a part fails."""

    def __init__(self) -> None:
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(obstore, name)

    async def get_range_async(self, *arguments: Any, **keywords: Any) -> object:
        self.requests += 1
        if self.requests == 1:
            raise GenericError("the connection broke")
        return await obstore.get_range_async(*arguments, **keywords)


async def test_no_further_parts_are_requested_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(open_store(tmp_path.as_uri()))
    manifest = await store.write(a_manifest(), {"large": b"x" * 500}, overwrite=False)
    failing = FailingObstore()
    monkeypatch.setattr(upload_parts, "SMALLEST_PART", 1)
    monkeypatch.setattr(store_module, "obstore", failing)

    with pytest.raises(StoreFailed, match="failed or did not respond") as raised:
        await store.read_file(manifest, "large")
    assert "the connection broke" in str(raised.value.__cause__)
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    assert failing.requests == upload_parts.IN_FLIGHT


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            GenericError("No space left on device (os error 28)"),
            "full",
        ),
        (PermissionDeniedError("PUT was answered 403"), "denies access"),
        (UnauthenticatedError("the credentials have expired"), "denies access"),
        (GenericError("Permission denied (os error 13)"), "denies access"),
        (
            GenericError("Read-only file system (os error 30)"),
            "denies access",
        ),
        (OSError(28, "No space left on device"), "full"),
        (GenericError("the connection broke"), "failed or did not respond"),
    ],
)
async def test_store_errors_have_readable_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    async def fail(*_arguments: object, **_keywords: object) -> None:
        raise error

    store = CheckpointStore(open_store(tmp_path.as_uri()))
    monkeypatch.setattr(obstore, "put_async", fail)

    with pytest.raises(StoreFailed, match=f"^the checkpoint store .*{words}.* send the request"):
        await store.write(a_manifest(), {"a": b"x"}, overwrite=False)


def test_part_sizes_are_within_the_limits_of_s3_for_any_file_size() -> None:
    sizes = [0, 1, 5 << 20, (5 << 20) + 1, 52_428_800_001, 65_520_000_000, 3_246_000_000_000]
    for size in sizes:
        spans = list(upload_parts.parts(size))
        lengths = [part.stop - part.start for part in spans]

        assert sum(lengths) == size
        assert len(spans) <= 10_000
        assert all(5 << 20 <= length <= 5 << 30 for length in lengths[:-1])
        assert [part.start for part in spans[1:]] == [part.stop for part in spans[:-1]]
        assert max(lengths, default=0) <= upload_parts.part_size(size)


def test_parts_in_transfer_take_little_memory_compared_to_the_file() -> None:
    for size in (1, 65_520_000_000, 3_246_000_000_000):
        assert upload_parts.IN_FLIGHT * upload_parts.part_size(size) <= max(60 << 20, size * 0.0014)
