"""A new run whose journal takes time to start: it may be deleted or asked for again meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig, DurabilityLevel
from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_testing.serving.bare_heads import MODEL, Head, a_head
from tinkercloud_worker.journal.folder import JournalFolder
from tinkercloud_worker.journal.shared_log import LogPlace, SharedLog

pytestmark = pytest.mark.timeout(120)


@dataclass
class Gate:
    """Holds the first journal that is started, until it is opened."""

    loop: asyncio.AbstractEventLoop
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Wait in a thread."""
        self.loop.call_soon_threadsafe(self.reached.set)
        self.opened.wait()


@pytest.fixture
async def disk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """Return the gate of a disk that takes time to write the manifest of a journal."""
    gate, write = Gate(asyncio.get_running_loop()), JournalFolder.write_manifest

    def write_late(folder: JournalFolder, manifest: JournalManifest) -> None:
        gate.wait()
        write(folder, manifest)

    monkeypatch.setattr(JournalFolder, "write_manifest", write_late)
    yield gate
    gate.opened.set()


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """Return the gate of a checkpoint store that takes time to create the first object."""
    gate, take_over = Gate(asyncio.get_running_loop()), SharedLog.take_over

    async def take_over_late(log: SharedLog, *arguments: Any) -> LogPlace:
        await asyncio.to_thread(gate.wait)
        return await take_over(log, *arguments)

    monkeypatch.setattr(SharedLog, "take_over", take_over_late)
    yield gate
    gate.opened.set()


def a_durable_head(
    folder: Path, level: DurabilityLevel = "local", generation: str = "g1"
) -> AbstractContextManager[Head]:
    durability = DurabilityConfig(level=level)
    root, journals = (folder / "store").as_uri(), folder / "journals"
    return a_head(root, folder, generation, journals=journals, durability=durability)


def left_by_runs(folder: Path) -> list[Path]:
    """Return all files of runs on the disk and in the store."""
    return [path for path in folder.glob("**/runs/**/*") if path.is_file()]


def copies() -> list[str]:
    """Return the tasks that copy journals."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith("Shipping.")]


async def test_a_run_that_is_deleted_while_its_copy_starts_leaves_nothing(
    tmp_path: Path, store: Gate
) -> None:
    with a_durable_head(tmp_path, "remote") as head:
        creating = asyncio.create_task(head.begin())
        await store.reached.wait()
        await head.service.delete_model(MODEL)
        store.opened.set()

        with pytest.raises(NotFound, match="was deleted"):
            await creating
        assert copies() == []
        assert left_by_runs(tmp_path) == []
        assert head.service.durability.states() == {}


async def test_a_run_that_is_deleted_while_its_journal_is_written_leaves_nothing(
    tmp_path: Path, disk: Gate
) -> None:
    with a_durable_head(tmp_path, "remote") as head:
        creating = asyncio.create_task(head.begin())
        await disk.reached.wait()
        await head.service.delete_model(MODEL)
        disk.opened.set()

        with pytest.raises(NotFound, match="was deleted"):
            await creating
        assert copies() == []
        assert left_by_runs(tmp_path) == []


async def test_a_run_that_replaces_one_that_was_deleted_while_its_copy_started_is_durable(
    tmp_path: Path, store: Gate
) -> None:
    with a_durable_head(tmp_path, "remote") as head:
        creating = asyncio.create_task(head.begin())
        await store.reached.wait()
        await head.service.delete_model(MODEL)
        again = asyncio.create_task(head.begin())
        store.opened.set()
        await asyncio.gather(creating, return_exceptions=True)
        await again
        head.add(1)
        loss = await head.loss(1)
        assert len(copies()) == 1
        assert head.service.durability.states() == {str(MODEL): None}

    with a_durable_head(tmp_path, "remote", "g2") as head:
        await head.resume("g1")
        assert await head.loss(1) == loss


@pytest.mark.parametrize("level", ["local", "remote"])
async def test_a_repeated_creation_is_answered_when_its_result_can_be_asked_for(
    level: DurabilityLevel, tmp_path: Path, disk: Gate
) -> None:
    with a_durable_head(tmp_path, level) as head:

        async def create() -> bytes:
            await head.begin()
            return await head.answer(0)

        first = asyncio.create_task(create())
        await disk.reached.wait()
        second = asyncio.create_task(create())
        # Its answer would be refused from here on if it did not wait for the first one.
        await asyncio.sleep(0.01)
        disk.opened.set()

        assert b"model_id" in await first
        assert await second == await first


async def test_a_creation_whose_caller_has_left_is_completed(tmp_path: Path, disk: Gate) -> None:
    with a_durable_head(tmp_path) as head:
        first = asyncio.create_task(head.begin())
        await disk.reached.wait()
        first.cancel()
        disk.opened.set()

        await head.begin()
        assert b"model_id" in await head.answer(0)


async def test_a_creation_whose_journal_can_not_be_started_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise InvalidRequest("the journal of an earlier run is damaged")

    with a_durable_head(tmp_path, "remote") as head:
        with monkeypatch.context() as patched:
            patched.setattr(SharedLog, "delete", refuse)
            with pytest.raises(InvalidRequest, match="is damaged"):
                await head.begin()

        await head.begin()
        assert b"model_id" in await head.answer(0)
        assert head.service.durability.states() == {str(MODEL): None}


async def test_a_head_that_stops_waits_for_the_journal_of_a_new_run(
    tmp_path: Path, disk: Gate
) -> None:
    with a_durable_head(tmp_path) as head:
        creating = asyncio.create_task(head.begin())
        await disk.reached.wait()
        stopping = asyncio.create_task(head.service.suspend())
        await asyncio.sleep(0.01)
        disk.opened.set()
        await creating
        await stopping

    with a_durable_head(tmp_path, generation="g2") as head:
        await head.resume("g1")
        head.add(1)
        assert await head.loss(1) > 0
