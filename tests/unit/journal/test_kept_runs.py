"""A head saves the runs that are only on its disk, although no client has asked for them.

The disk of a head in a pod is deleted with the pod. Each second head here continues nothing by
itself: it has the journals of a first one that was killed.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tinkercloud_protocol.heads import journal_files
from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.journal_files import manifest_path, run_ids
from tinkercloud_protocol.heads.launch import Timings
from tinkercloud_protocol.wire.errors import Overloaded, StateLost, Unavailable
from tinkercloud_testing.serving.bare_heads import MODEL, Head, a_head
from tinkercloud_worker.checkpoints.store import CheckpointStore, StoreFailed
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.durable.durable_runs import Durability
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.serve.lifecycle import Lifecycle
from tinkercloud_worker.head.serve.service import HeadService

pytestmark = pytest.mark.timeout(120)


@dataclass
class Disks:
    """A checkpoint store, and the disk of the heads that start one after another in a pod."""

    folder: Path

    @property
    def journals(self) -> Path:
        return self.folder / "journals"

    def head(self, generation: str, disk: str = "journals") -> AbstractContextManager[Head]:
        """Run a head; the end of the context is like killing it."""
        root = (self.folder / "store").as_uri()
        return a_head(root, self.folder, generation, journals=self.folder / disk)

    async def check_continues(self, expected: float) -> None:
        """Check that a head elsewhere, whose disk is empty, has the run."""
        with self.head("g3", disk="elsewhere") as head:
            await head.resume("g1")
            assert await head.loss(3) == expected
            head.apply(4)
            assert b"step" in await head.answer(4)


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


async def train(head: Head) -> None:
    """Make one step, and send the data of a second one."""
    await head.begin()
    head.add(1)
    head.apply(2)
    head.add(3, first=9)
    await head.confirmed()
    await head.answer(3)


@pytest.fixture
async def expected(disks: Disks) -> float:
    """Train in a head that is killed; return the loss of its second step."""
    with disks.head("g1") as head:
        await train(head)
        return await head.loss(3)


async def test_a_damaged_manifest_stops_nobody_from_being_saved(
    disks: Disks, expected: float
) -> None:
    damaged = manifest_path(disks.journals, "other:train:0")
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")

    with disks.head("g2") as head:
        await head.service.suspend()

    await disks.check_continues(expected)


async def test_a_disk_that_cannot_be_read_delays_what_is_on_it_and_no_other_run(
    disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_root: Path) -> list[str]:
        raise OSError("Input/output error")

    with disks.head("g1") as head:
        await train(head)
        expected = await head.loss(3)
        with monkeypatch.context() as broken:
            broken.setattr(journal_files, "run_ids", fail)
            with pytest.raises(Unavailable, match="Input/output error"):
                await head.service.checkpoint()
            assert list((disks.folder / "store").rglob("last-step-000001/manifest.json"))
            with pytest.raises(Unavailable, match="Input/output error"):
                await head.service.suspend()
        await head.service.suspend()

    await disks.check_continues(expected)


@pytest.mark.parametrize("how", ["suspended", "asked for"])
async def test_a_run_that_cannot_be_created_again_for_now_keeps_its_journal(
    disks: Disks, expected: float, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def reject(_model_id: str, _lora: object) -> None:
        raise Overloaded("no memory for this model")

    with disks.head("g2") as head, monkeypatch.context() as full:
        full.setattr(head.backend.trainer, "add_model", reject)
        if how == "asked for":
            await head.resume("g1")
            assert b"no memory for this model" in await head.answer(0)
        with pytest.raises(Unavailable, match="no memory for this model"):
            await head.service.suspend()

    with disks.head("g3") as head:
        await head.resume("g1")
        assert await head.loss(3) == expected


async def test_a_head_that_is_suspended_saves_the_runs_on_its_disk(
    disks: Disks, expected: float
) -> None:
    with disks.head("g2") as head:
        await head.service.suspend()
        assert not list(disks.journals.glob("runs/*/journal/manifest.json"))

    await disks.check_continues(expected)


async def test_a_run_on_the_disk_of_a_head_is_moved_with_its_state(
    disks: Disks, expected: float
) -> None:
    with disks.head("g2") as head:
        await head.service.move_model(MODEL)

        await disks.check_continues(expected)


async def test_two_calls_that_move_the_same_run_on_the_disk_of_a_head_agree(
    disks: Disks, expected: float
) -> None:
    with disks.head("g2") as head:
        await asyncio.gather(*[head.service.move_model(MODEL) for _ in range(2)])

        await disks.check_continues(expected)


async def test_the_last_checkpoint_of_a_run_on_the_disk_has_its_last_step(
    disks: Disks, expected: float
) -> None:
    with disks.head("g2") as head:
        saved = await head.weights()
    with a_head((disks.folder / "other").as_uri(), disks.folder, "undisturbed") as head:
        await train(head)
        assert await head.loss(3) == expected
        assert await head.weights() == saved


async def be_away(*_: object) -> None:
    raise StoreFailed("the store is away")


@pytest.mark.parametrize("call", ["suspend", "move", "checkpoint"])
async def test_nothing_succeeds_while_a_run_on_the_disk_can_not_be_continued(
    call: str, disks: Disks, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disks.head("g2") as head:
        service = head.service
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "suspend": service.suspend,
            "move": lambda: service.move_model(MODEL),
            "checkpoint": service.checkpoint,
        }
        with monkeypatch.context() as patched:
            patched.setattr(CheckpointStore, "find_suspended", be_away)
            with pytest.raises((Unavailable, StoreFailed), match="the store is away"):
                await calls[call]()
        await calls[call]()
        await service.suspend()

    await disks.check_continues(expected)


async def test_runs_on_a_disk_that_outlives_the_head_stay_there(
    disks: Disks, expected: float
) -> None:
    with disks.head("g2") as head:
        unsaved = str(disks.folder / "unsaved")
        config = head.backend.config.model_copy(update={"unsaved_dir": unsaved})
        service = HeadService(replace(head.backend, config=config))
        await service.suspend()
        service.close()

    with disks.head("g3") as head:
        await head.resume("g1")
        assert await head.loss(3) == expected


async def test_a_run_that_can_never_be_continued_does_not_keep_a_head_from_stopping(
    disks: Disks, expected: float
) -> None:
    assert expected
    (segment,) = disks.journals.glob(f"runs/{MODEL}/journal/*.log")
    content = bytearray(segment.read_bytes())
    content[40] ^= 1
    segment.write_bytes(content)

    with disks.head("g2") as head:
        await head.service.suspend()
        assert head.service.status().suspended


async def test_a_journal_that_is_older_than_the_stored_state_is_not_saved(disks: Disks) -> None:
    with disks.head("g1") as head:
        await train(head)
        shutil.copytree(disks.journals, disks.folder / "old")
        await head.service.suspend()
        stored = await head.manifest()

    with disks.head("g2", disk="old") as head:
        await head.service.suspend()
        assert await head.manifest() == stored


async def test_a_run_on_the_disk_that_is_deleted_is_not_saved(
    disks: Disks, expected: float
) -> None:
    assert expected
    with disks.head("g2") as head:
        deleting = asyncio.create_task(head.service.delete_model(MODEL))
        await asyncio.sleep(0)
        await head.service.suspend()
        await deleting

    with disks.head("g3") as head, pytest.raises(StateLost):
        await head.resume("g1")


async def test_a_run_that_was_continued_for_another_call_is_the_one_that_a_client_asks_for(
    disks: Disks, expected: float
) -> None:
    with disks.head("g2") as head:
        await head.service.checkpoint()
        await head.resume("g1")
        assert await head.loss(3) == expected


async def test_a_head_that_stops_while_it_loads_saves_the_runs_on_its_disk(
    disks: Disks, expected: float
) -> None:
    may_load = threading.Event()
    with disks.head("g2") as head:

        def build() -> Backend:
            may_load.wait()
            return head.backend

        lifecycle = Lifecycle(Timings(), build, lambda: True)
        lifecycle.start()
        stopping = asyncio.create_task(lifecycle.stop())
        await asyncio.sleep(0.01)
        may_load.set()
        await stopping

    await disks.check_continues(expected)


@pytest.mark.parametrize("generation", ["g1", "g2"])
async def test_a_run_is_found_whichever_of_its_heads_the_catalog_names(
    generation: str, disks: Disks
) -> None:
    with disks.head("g1", disk="first") as head:
        await train(head)
        await head.service.suspend()
    with disks.head("g2") as head:
        await head.resume("g1")
        head.apply(4)
        head.add(5)
        loss = await head.loss(5)
    with disks.head("g3") as head:
        await head.service.suspend()

    with disks.head("g4", disk="elsewhere") as head:
        await head.resume(generation)
        assert await head.loss(5) == loss


async def test_a_journal_does_not_exist_before_the_state_that_it_follows(
    disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disks.head("g1", disk="first") as head:
        await train(head)
        await head.service.suspend()
    commit, existed = CheckpointStore.commit_suspended, list[bool]()

    async def watch(store: CheckpointStore, manifest: SuspendedManifest) -> None:
        existed.append(bool(run_ids(disks.journals)))
        await commit(store, manifest)

    monkeypatch.setattr(CheckpointStore, "commit_suspended", watch)
    with disks.head("g2") as head:
        await head.resume("g1")

        assert existed == [False]
        assert run_ids(disks.journals)


async def test_a_run_that_a_stopping_head_did_not_resume_any_more_leaves_no_journal_there(
    disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disks.head("g1", disk="first") as head:
        await train(head)
        expected = await head.loss(3)
        await head.service.suspend()
        stored = await head.manifest()
    begin_from, stopping = Durability.begin_from, list[asyncio.Task[None]]()

    with disks.head("g2") as head:

        async def begin_and_stop(
            durability: Durability,
            model: LiveModel,
            state: SuspendedManifest,
            store: CheckpointStore,
        ) -> None:
            await begin_from(durability, model, state, store)
            stopping.append(asyncio.create_task(head.service.suspend()))
            await asyncio.sleep(0)

        monkeypatch.setattr(Durability, "begin_from", begin_and_stop)
        with pytest.raises(Unavailable, match="is stopping"):
            await head.resume("g1")
        await asyncio.gather(*stopping)

        assert run_ids(disks.journals) == []
        assert await head.manifest() == stored
        monkeypatch.undo()
        await disks.check_continues(expected)


async def test_requests_that_only_the_kernel_has_are_on_the_disk_before_they_are_repeated(
    disks: Disks, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (segment,) = disks.journals.glob(f"runs/{MODEL}/journal/*.log")
    fsync, on_disk = os.fsync, set[str]()

    def watch(descriptor: int) -> None:
        fsync(descriptor)
        on_disk.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    monkeypatch.setattr(os, "fsync", watch)
    root, config = (disks.folder / "store").as_uri(), DurabilityConfig(fsync=True)
    with a_head(root, disks.folder, "g2", journals=disks.journals, durability=config) as head:
        await head.resume("g1")
        assert str(segment) in on_disk
        assert await head.loss(3) == expected
