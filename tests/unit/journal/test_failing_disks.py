"""A disk that fails stops no training; the run is degraded until a snapshot can be written."""

import asyncio
import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from obstore.store import ObjectStore
from pydantic import ValidationError

from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig, DurabilityReport
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.wire.errors import StateLost
from tinkercloud_testing.serving.bare_heads import MODEL, a_head, described, train, until
from tinkercloud_testing.serving.metrics import metric_value
from tinkercloud_worker import metrics
from tinkercloud_worker.checkpoints import durable
from tinkercloud_worker.head.durable.snapshots import Snapshot, Snapshots
from tinkercloud_worker.head.serve.lease_reports import lease_reports
from tinkercloud_worker.journal.folder import JournalFolder, Segment

pytestmark = pytest.mark.timeout(120)


@contextmanager
def full_disk() -> Iterator[None]:
    """Fail all writes of journals and local stores as a full disk does."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_manifest", "create"):
            patch.setattr(JournalFolder, name, fail)
        patch.setattr(Segment, "write", fail)
        patch.setattr(durable, "put", fail)
        yield


@contextmanager
def read_only_disk() -> Iterator[None]:
    """Fail all changes of journals and local stores as a disk does that was mounted read-only."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_manifest", "create", "withdraw", "remove_before", "write_deaths"):
            patch.setattr(JournalFolder, name, fail)
        patch.setattr(Segment, "write", fail)
        patch.setattr(durable, "put", fail)
        yield


@contextmanager
def full_journals() -> Iterator[None]:
    """Fail all writes of requests as a full disk does."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "write", fail)
        yield


def num_failed_snapshots() -> float:
    return metric_value(metrics.SNAPSHOT_FAILURES)


async def test_after_a_read_only_disk_a_run_is_durable_again_and_survives_a_kill(
    tmp_path: Path,
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "undisturbed") as head:
        await head.begin()
        expected = await train(head, 1, 10)

    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        losses = await train(head, 1, 2)
        with read_only_disk():
            losses += await train(head, 3, 6)
            assert "Read-only file system" in str(described(head).degraded)
        await until(lambda: described(head).is_durable)
        losses += await train(head, 7, 8)

    with a_head(root, tmp_path, "g2", journals=journals) as head:
        await head.resume("g1")
        losses += await train(head, 9, 10)
    assert losses == expected


async def test_a_full_disk_degrades_a_run_that_becomes_durable_again(tmp_path: Path) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "undisturbed") as head:
        await head.begin()
        expected = await train(head, 1, 10)

    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        losses = await train(head, 1, 2)
        assert head.service.status().durability == "local"
        assert described(head).is_durable
        with full_disk():
            losses += await train(head, 3, 6)
            assert head.service.status().durability == "degraded"
            assert "No space left on device" in str(described(head).degraded)
            assert not described(head).is_durable
            (gauge,) = metrics.JOURNALS_DEGRADED.collect()
            assert gauge.samples[0].value == 1
            # Another head would not know of steps that are in memory only.
            manifest = journals / f"runs/{MODEL}/journal/manifest.json"
            await until(lambda: not manifest.exists())
        await until(lambda: described(head).is_durable)
        assert head.service.status().durability == "local"
        losses += await train(head, 7, 8)

    with a_head(root, tmp_path, "g2", journals=journals) as head:
        await head.resume("g1")
        losses += await train(head, 9, 10)
    assert losses == expected


async def test_a_journal_that_fails_in_an_unforeseen_way_stops_no_training_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object, __: bytes) -> None:
        raise MemoryError

    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        with monkeypatch.context() as broken:
            broken.setattr(Segment, "write", fail)
            assert len(await train(head, 1, 2)) == 1
            assert "MemoryError" in str(described(head).degraded)
        await until(lambda: described(head).is_durable)


async def test_a_head_killed_as_soon_as_its_run_is_durable_again_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    left_behind, written, arrived = tmp_path / "left behind", asyncio.Event(), asyncio.Event()
    write, write_manifest = Snapshots.write, JournalFolder.write_manifest

    async def write_and_wait(snapshots: Snapshots, snapshot: Snapshot) -> SuspendedManifest:
        manifest = await write(snapshots, snapshot)
        written.set()
        await arrived.wait()
        return manifest

    def write_and_copy(folder: JournalFolder, manifest: JournalManifest) -> None:
        write_manifest(folder, manifest)
        shutil.copytree(journals, left_behind)

    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        await train(head, 1, 2)
        with full_disk():
            await train(head, 3, 6)
            manifest = journals / f"runs/{MODEL}/journal/manifest.json"
            await until(lambda: not manifest.exists())
            monkeypatch.setattr(Snapshots, "write", write_and_wait)
        await written.wait()
        monkeypatch.setattr(JournalFolder, "write_manifest", write_and_copy)
        losses = await train(head, 7, 8)
        arrived.set()
        await until(lambda: described(head).is_durable)
    monkeypatch.undo()

    with a_head(root, tmp_path, "g2", journals=left_behind) as head:
        await head.resume("g1")
        assert await head.loss(7) == losses[0]


async def test_a_head_reports_which_runs_are_degraded_whenever_that_changes(tmp_path: Path) -> None:
    root, journals, drained = (tmp_path / "store").as_uri(), tmp_path / "journals", asyncio.Event()
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        reports = lease_reports(head.backend, head.service.durability, drained)

        async def next_state() -> dict[str, str | None]:
            async for line in reports:
                with suppress(ValidationError):
                    return DurabilityReport.model_validate_json(line).models
            raise AssertionError("the reports have ended")

        assert await next_state() == {}
        await head.begin()
        assert await next_state() == {str(MODEL): None}
        with full_disk():
            await train(head, 1, 2)
            degraded = await next_state()
            assert "No space left on device" in str(degraded[str(MODEL)])
        # A snapshot is tried again by itself, without a request that would cause a report.
        assert await next_state() == {str(MODEL): None}
        await head.service.delete_model(MODEL)
        assert await next_state() == {}
        drained.set()
        assert [line async for line in reports if b"models" in line] == []


async def test_a_head_killed_while_degraded_loses_the_run_and_says_so(tmp_path: Path) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with full_disk(), a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        await train(head, 1, 2)
        assert head.service.status().durability == "degraded"

    with (
        a_head(root, tmp_path, "g2", journals=journals) as head,
        pytest.raises(StateLost, match="left no journal"),
    ):
        await head.resume("g1")


async def test_a_snapshot_replaces_a_journal_that_becomes_too_large(tmp_path: Path) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    config = DurabilityConfig(max_journal_bytes=1000)
    with a_head(root, tmp_path, "g1", journals=journals, durability=config) as head:
        await head.begin()
        await train(head, 1, 40)
        segments = journals / f"runs/{MODEL}/journal"
        await until(lambda: sum(s.stat().st_size for s in segments.glob("*.log")) < 2500)
        # A disk that is slower than the training makes the run degraded for a while.
        await until(lambda: described(head).is_durable)
        assert list(journals.glob(f"runs/{MODEL}/suspended/manifest.json"))


async def test_a_journal_that_no_snapshot_can_replace_ends_at_twice_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    config = DurabilityConfig(max_journal_bytes=500)
    with a_head(root, tmp_path, "g1", journals=journals, durability=config) as head:
        await head.begin()
        monkeypatch.setattr(durable, "put", fail)
        await train(head, 1, 20)

        assert "durability.max_journal_bytes is 500" in str(described(head).degraded)
        assert "No space left on device" in str(described(head).degraded)


async def test_a_snapshot_that_fails_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = durable.put

    async def put_unless_large(store: ObjectStore, key: str, content: bytes) -> None:
        if key.endswith("/optimizer.safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device")
        await put(store, key, content)

    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    config = DurabilityConfig(snapshot_steps=1)
    with a_head(root, tmp_path, "g1", journals=journals, durability=config) as head:
        await head.begin()
        monkeypatch.setattr(durable, "put", put_unless_large)
        failures = num_failed_snapshots()
        await train(head, 1, 2)
        await until(lambda: num_failed_snapshots() > failures)

        assert described(head).is_durable
        assert not [path for path in journals.glob("runs/*/suspended/**/*") if path.is_file()]


async def test_a_disk_with_room_for_one_snapshot_is_enough_once_the_last_one_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = durable.put
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    snapshots = journals / f"runs/{MODEL}/suspended"

    async def put_in_one(store: ObjectStore, key: str, content: bytes) -> None:
        others = {path.name for path in snapshots.glob("*/")} - {Path(key).parent.name}
        if others and "/suspended/manifest.json" not in key:
            raise OSError(errno.ENOSPC, "No space left on device")
        await put(store, key, content)

    config = DurabilityConfig(snapshot_steps=2)
    with a_head(root, tmp_path, "undisturbed") as head:
        await head.begin()
        expected = await train(head, 1, 8)
    with a_head(root, tmp_path, "g1", journals=journals, durability=config) as head:
        await head.begin()
        losses = await train(head, 1, 4)
        await until((snapshots / "manifest.json").exists)
        monkeypatch.setattr(durable, "put", put_in_one)
        with full_journals():
            losses += await train(head, 5, 6)
            assert not described(head).is_durable
        await until(lambda: described(head).is_durable)
    with a_head(root, tmp_path, "g2", journals=journals) as head:
        await head.resume("g1")
        losses += await train(head, 7, 8)
    assert losses == expected


async def test_a_deleted_model_leaves_no_journal(tmp_path: Path) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        await train(head, 1, 2)
        await head.service.delete_model(MODEL)

        assert not list(journals.glob("runs/*"))
