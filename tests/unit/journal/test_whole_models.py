"""Fully fine-tuned models have journals too; snapshots come by time and size, not by steps."""

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
from torch import Tensor

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_testing.serving.bare_heads import (
    MODEL,
    PATIENCE_SECONDS,
    WHOLE,
    Head,
    a_head,
    described,
    train,
    until,
)
from tinkercloud_testing.serving.metrics import metric_value
from tinkercloud_worker import metrics
from tinkercloud_worker.checkpoints import tensor_file
from tinkercloud_worker.checkpoints.tensor_file import Growing
from tinkercloud_worker.head.durable.journal_room import JournalRoom, NoRoom, RoomShare

pytestmark = pytest.mark.timeout(120)

HOURS = 10_000.0
NEVER = DurabilityConfig(snapshot_steps=1, snapshot_seconds=0.001, whole_model_seconds=HOURS)
ALWAYS = NEVER.model_copy(update={"whole_model_seconds": 0.001})


async def undisturbed(tmp_path: Path, last: int) -> list[float]:
    with a_head((tmp_path / "store").as_uri(), tmp_path, "undisturbed", spec=WHOLE) as head:
        await head.begin()
        return await train(head, 1, last)


def snapshot(journals: Path) -> Path:
    return journals / f"runs/{MODEL}/suspended/manifest.json"


async def test_a_killed_head_loses_no_step_of_a_whole_model_by_default(tmp_path: Path) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    expected = await undisturbed(tmp_path, 10)

    with a_head(root, tmp_path, "g1", journals=journals, spec=WHOLE) as head:
        await head.begin()
        losses = await train(head, 1, 6)
        assert described(head).is_durable
    with a_head(root, tmp_path, "g2", journals=journals, spec=WHOLE) as head:
        await head.resume("g1")
        losses += await train(head, 7, 10)

    assert losses == expected
    assert not snapshot(journals).exists()


async def test_steps_alone_cause_no_snapshot_of_a_whole_model(tmp_path: Path) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g", journals=journals, durability=NEVER, spec=WHOLE) as head:
        await head.begin()
        await train(head, 1, 10)
        run = head.service.durability.of(str(MODEL))
        assert run is not None
        assert run._saving is None
        assert not snapshot(journals).exists()


@pytest.mark.parametrize(
    "config",
    [ALWAYS, NEVER.model_copy(update={"max_journal_bytes": 1000})],
    ids=["by time", "by size"],
)
async def test_a_snapshot_replaces_the_journal_of_a_whole_model(
    tmp_path: Path, config: DurabilityConfig
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    expected = await undisturbed(tmp_path, 24)

    with a_head(root, tmp_path, "g1", journals=journals, durability=config, spec=WHOLE) as head:
        await head.begin()
        losses = await train(head, 1, 20)
        await until(snapshot(journals).exists)
        await until(lambda: described(head).is_durable)
    with a_head(root, tmp_path, "g2", journals=journals, durability=config, spec=WHOLE) as head:
        await head.resume("g1")
        losses += await train(head, 21, 24)
    assert losses == expected


async def test_a_snapshot_that_is_due_waits_for_the_step_and_has_no_gradient(
    tmp_path: Path,
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    config = NEVER.model_copy(update={"whole_model_seconds": 0.5})
    with a_head(root, tmp_path, "g", journals=journals, durability=config, spec=WHOLE) as head:
        await head.begin()
        await train(head, 1, 2)
        head.add(3)
        await head.answer(3)
        run = head.service.durability.of(str(MODEL))
        assert run is not None
        await until(lambda: (run._schedule.due_at() or 0) <= time.monotonic())
        head.add(4)
        await head.answer(4)
        await head.service.accepted(str(MODEL))
        head.apply(5)
        await until(snapshot(journals).exists)
        assert "gradient" not in snapshot(journals).read_text()


@dataclass
class SlowFile:
    """A growing file, of which the writer waits after the first part."""

    file: Growing
    began: Event
    may_continue: Event
    parts: list[int]

    def write(self, content: bytes | memoryview, /) -> None:
        self.file.write(content)
        self.parts.append(len(content))
        self.began.set()
        assert self.may_continue.wait(PATIENCE_SECONDS)


async def test_a_deleted_model_is_not_written_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    began, may_continue, parts = Event(), Event(), list[int]()
    write = tensor_file.write

    def slowly(tensors: Mapping[str, Tensor], file: Growing) -> None:
        write(tensors, SlowFile(file, began, may_continue, parts))

    monkeypatch.setattr(tensor_file, "write", slowly)
    with a_head(root, tmp_path, "g", journals=journals, durability=ALWAYS, spec=WHOLE) as head:
        await head.begin()
        await train(head, 1, 2)
        await until(began.is_set)
        head.add(3)
        head.apply(4)
        await head.answer(3)
        failures = metric_value(metrics.SNAPSHOT_FAILURES)

        deletion = asyncio.create_task(head.service.delete_model(MODEL))
        await until(lambda: not head.service.held())
        may_continue.set()
        await deletion

        assert len(parts) == 1
        assert not [path for path in journals.rglob("*") if path.is_file()]
        assert metric_value(metrics.SNAPSHOT_FAILURES) == failures


async def a_run_without_room(head: Head, last: int) -> str:
    """Train until a snapshot has failed; return why the run is degraded."""
    await head.begin()
    await train(head, 1, last)
    await until(lambda: described(head).degraded is not None)
    return str(described(head).degraded)


def full_disk(patch: pytest.MonkeyPatch, free: int = 1000) -> None:
    patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))


async def test_a_whole_model_without_room_is_degraded_until_there_is_and_survives_a_kill(
    tmp_path: Path,
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    expected = await undisturbed(tmp_path, 8)

    with a_head(root, tmp_path, "g1", journals=journals, durability=ALWAYS, spec=WHOLE) as head:
        with pytest.MonkeyPatch.context() as patch:
            full_disk(patch)
            reason = await a_run_without_room(head, 4)
            model_bytes = head.backend.trainer.memory_bytes(str(MODEL))
            assert f"it takes {12 * model_bytes // 16} bytes" in reason
            assert f"and 1000 are free in {journals}" in reason
            assert not [path for path in journals.rglob("suspended/**/*") if path.is_file()]
        # Without room, the journal still has all steps.
        shutil.copytree(journals, tmp_path / "left behind")
        await until(lambda: described(head).is_durable)
        assert snapshot(journals).exists()

    with a_head(
        root, tmp_path, "g2", journals=tmp_path / "left behind", durability=NEVER, spec=WHOLE
    ) as head:
        await head.resume("g1")
        assert [await head.loss(1), await head.loss(3)] == expected[:2]
        assert await train(head, 5, 8) == expected[2:]


async def test_room_that_is_too_small_for_two_snapshots_is_named_as_a_setting(
    tmp_path: Path,
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    config = ALWAYS.model_copy(update={"max_disk_bytes": 5000})
    with a_head(root, tmp_path, "g", journals=journals, durability=config, spec=WHOLE) as head:
        assert "the limit is 5000 (durability.max_disk_bytes" in await a_run_without_room(head, 2)


async def test_attempts_without_room_end_once_the_journal_is_full_and_come_ever_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    config = NEVER.model_copy(update={"max_journal_bytes": 500})
    with a_head(root, tmp_path, "g", journals=journals, durability=config, spec=WHOLE) as head:
        full_disk(monkeypatch)
        failures = metric_value(metrics.SNAPSHOT_FAILURES)
        await a_run_without_room(head, 40)
        await until(lambda: "max_journal_bytes is 500" in str(described(head).degraded))
        assert "no room for a snapshot" in str(described(head).degraded)
        # Not one for each of the 40 requests.
        assert metric_value(metrics.SNAPSHOT_FAILURES) - failures < 20
        await until(lambda: not list(journals.rglob("*.log")))


async def test_a_suspended_whole_model_that_does_not_fit_resumes_without_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    expected = await undisturbed(tmp_path, 6)
    with a_head(root, tmp_path, "g1", spec=WHOLE) as head:
        await head.begin()
        losses = await train(head, 1, 4)
        await head.service.suspend()

    full_disk(monkeypatch)
    with a_head(root, tmp_path, "g2", journals=journals, durability=NEVER, spec=WHOLE) as head:
        await head.resume("g1")
        assert "no room for a snapshot" in str(described(head).degraded)
        assert not list(journals.rglob("*.safetensors"))
        losses += await train(head, 5, 6)
    assert losses == expected


def two_shares(tmp_path: Path, patch: pytest.MonkeyPatch) -> tuple[RoomShare, RoomShare]:
    full_disk(patch, 1200)
    room = JournalRoom(tmp_path, DurabilityConfig(max_journal_bytes=100))
    return room.share("a", "me"), room.share("b", "me")


def test_snapshots_that_are_written_at_the_same_time_share_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_shares(tmp_path, monkeypatch)
    first.reserve(600)
    with pytest.raises(NoRoom, match="it takes 600 bytes, 800 are kept for"):
        second.reserve(600)
    first.committed()
    second.reserve(600)


def test_the_room_of_a_journal_is_kept_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, _ = two_shares(tmp_path, monkeypatch)
    with pytest.raises(NoRoom):
        share.reserve(1001)
    share.reserve(1000)
