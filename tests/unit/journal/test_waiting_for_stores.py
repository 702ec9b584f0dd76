"""How long requests and results wait for the checkpoint store, with `remote`."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
import pytest

from tinkercloud_protocol.heads import journal_copy
from tinkercloud_protocol.heads.checkpoint_manifest import BODIES
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.journal_copy import FOLDER, Header
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_testing.serving.bare_heads import (
    MODEL,
    PATIENCE_SECONDS,
    Head,
    a_head,
    described,
    train,
    until,
)
from tinkercloud_worker.checkpoints import durable
from tinkercloud_worker.checkpoints.store import StoreFailed
from tinkercloud_worker.journal.folder import JournalFolder
from tinkercloud_worker.journal.shared_log import SharedLog

pytestmark = pytest.mark.timeout(120)


class Store:
    """The module `obstore`, whose store of journals does not respond while it is held."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.responds = asyncio.Event()
        self.responds.set()
        self.was_asked = asyncio.Event()
        self.holds_next = False
        """Whether it responds once more only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    async def put_async(self, store: Any, key: str, *arguments: Any, **keywords: Any) -> Any:
        """Write, once the store responds."""
        if "/journal/" in key:
            self.was_asked.set()
            await self.responds.wait()
            if self.holds_next:
                self.hold()
        return await self._module.put_async(store, key, *arguments, **keywords)

    def hold(self) -> None:
        """Respond no more."""
        self.holds_next = False
        self.was_asked.clear()
        self.responds.clear()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    held = Store(obstore)
    monkeypatch.setattr(durable, "obstore", held)
    yield held
    held.responds.set()


@contextmanager
def training(folder: Path, config: DurabilityConfig, name: str) -> Iterator[Head]:
    root = (folder / "store").as_uri()
    with a_head(root, folder, name, journals=folder / name, durability=config) as head:
        yield head


async def test_a_request_is_neither_confirmed_nor_answered_before_the_store_has_it(
    tmp_path: Path, store: Store
) -> None:
    config = DurabilityConfig(level="remote", store_timeout_seconds=PATIENCE_SECONDS)
    with training(tmp_path, config, "g1") as head:
        await head.begin()
        store.hold()
        head.add(1)
        waiting = [asyncio.ensure_future(work) for work in (head.confirmed(), head.answer(1))]
        await store.was_asked.wait()
        # It has run by then; only its result is held back.
        await until(lambda: not head.service.why_waiting(f"{MODEL}:1")[1])
        assert not any(each.done() for each in waiting)
        assert described(head).is_durable

        store.responds.set()
        await asyncio.gather(*waiting)
        assert described(head).is_durable


async def test_a_repeated_request_is_not_answered_before_the_store_has_it_either(
    tmp_path: Path, store: Store
) -> None:
    config = DurabilityConfig(level="remote", store_timeout_seconds=PATIENCE_SECONDS)
    careless = config.model_copy(update={"wait_for_store": False, "store_seconds": 1000.0})
    with training(tmp_path, careless, "g1") as head:
        await head.begin()
        head.add(1)
        answer = await head.answer(1)

    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g2", journals=tmp_path / "g1", durability=config) as head:
        # It responds to the head that takes over the copy, and not when the request follows.
        store.holds_next = True
        await head.resume("g1")
        waiting = asyncio.ensure_future(head.answer(1))
        await store.was_asked.wait()
        await head.service.models.in_memory[str(MODEL)].queue.idle()
        await asyncio.sleep(0.1)
        assert not waiting.done()

        store.responds.set()
        assert await waiting == answer


async def test_after_a_time_requests_wait_no_longer_and_the_store_gets_them_later(
    tmp_path: Path, store: Store
) -> None:
    config = DurabilityConfig(level="remote", store_timeout_seconds=0.5)
    with training(tmp_path, config, "g1") as head:
        await head.begin()
        store.hold()
        head.add(1)
        head.apply(2)
        await head.confirmed()
        answers = [await head.answer(seq_id) for seq_id in (1, 2)]
        assert "did not respond within 0.5 s" in str(described(head).degraded)
        store.responds.set()
        await until(lambda: described(head).is_durable)

    with training(tmp_path, config, "g2") as head:
        await head.resume("g1")
        assert [await head.answer(seq_id) for seq_id in (1, 2)] == answers


async def test_without_wait_for_store_nothing_waits(tmp_path: Path, store: Store) -> None:
    config = DurabilityConfig(level="remote", wait_for_store=False, store_seconds=0.01)
    with training(tmp_path, config, "g1") as head:
        await head.begin()
        store.hold()
        head.add(1)
        await head.confirmed()
        await head.answer(1)
        await store.was_asked.wait()
        assert described(head).is_durable


async def test_a_request_after_others_that_were_copied_early_is_copied_too(tmp_path: Path) -> None:
    # The step is small and waits for its time; the data after it are large, and both are copied.
    config = DurabilityConfig(
        level="remote", wait_for_store=False, store_seconds=1, store_bytes=1000
    )
    store = open_store((tmp_path / "store" / FOLDER).as_uri())
    log = SharedLog(store, str(MODEL), PATIENCE_SECONDS)

    async def copied(num_requests: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (last := await log.last()) is None or last[1].next_index < num_requests:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.05)

    with training(tmp_path, config, "g1") as head:
        await head.begin()
        head.apply(1)
        head.add_all(2, [[5, 6, 7, 8]] * 20)
        await copied(2)
        head.apply(3)
        await head.confirmed()
        await copied(3)


async def test_a_head_starts_no_run_again_whose_journal_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DurabilityConfig(level="remote", store_timeout_seconds=0.2)
    with training(tmp_path, config, "g1") as head:
        await head.begin()
        head.add(1)
        answer = await head.answer(1)

    with training(tmp_path, config, "g2") as head:
        folder = tmp_path / "store" / "journals" / "runs" / str(MODEL) / "journal"
        aside = folder.with_name("aside")
        folder.rename(aside)
        folder.symlink_to(folder)
        with pytest.raises(Exception, match="checkpoint store"):
            await head.resume("g1")
        folder.unlink()
        aside.rename(folder)

        await head.resume("g1")
        assert await head.answer(1) == answer


async def test_the_copy_of_a_head_that_could_not_write_to_the_store_is_replaced(
    tmp_path: Path, store: Store
) -> None:
    config = DurabilityConfig(level="remote", store_timeout_seconds=0.5)

    async def loss_of(head: Head, seq_id: int, first: int) -> float:
        head.add(seq_id, first=first)
        head.apply(seq_id + 1)
        await head.confirmed()
        return await head.loss(seq_id)

    with training(tmp_path, config, "g1") as head:
        await head.begin()
        await loss_of(head, 1, first=6)
        shutil.copytree(tmp_path / "g1", tmp_path / "g2")
        head.add(3, first=8)
        await head.confirmed()
    store.hold()
    # The request that only the store has was never confirmed, so its client may send another one.
    with training(tmp_path, config, "g2") as head:
        await head.resume("g1")
        loss = await loss_of(head, 3, first=9)
    store.responds.set()
    shutil.copytree(tmp_path / "g2", tmp_path / "g3")
    with training(tmp_path, config, "g3") as head:
        await head.resume("g2")
        await until(lambda: described(head).degraded is None)
    with training(tmp_path, config, "g4") as head:
        await head.resume("g3")
        assert await head.loss(3) == loss


async def test_requests_that_overflow_while_a_snapshot_is_copied_are_replaced_by_the_next(
    tmp_path: Path, store: Store
) -> None:
    copies = tmp_path / f"store/journals/runs/{MODEL}/suspended"
    config = DurabilityConfig(
        level="remote", store_timeout_seconds=0.5, max_waiting_bytes=600, snapshot_steps=1
    )
    with training(tmp_path, config, "g1") as head:
        await head.begin()
        store.hold()
        await train(head, 1, 2)
        # What names the snapshot waits for the store; its files are there.
        await until(lambda: any(copies.glob(f"*/{BODIES}")))
        losses = await train(head, 3, 12)
        assert "slower" in str(described(head).degraded)
        store.responds.set()
        await until(lambda: described(head).is_durable)

    with training(tmp_path, config, "g2") as head:
        await head.resume("g1")
        assert await head.loss(11) == losses[-1]


async def test_requests_that_could_not_be_encoded_once_are_copied_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, config = journal_copy.encode, DurabilityConfig(level="remote")
    failed = asyncio.Event()

    def fail_once(header: Header, content: bytes) -> bytes:
        if failed.is_set():
            return encode(header, content)
        failed.set()
        raise MemoryError

    with training(tmp_path, config, "g1") as head:
        await head.begin()
        monkeypatch.setattr(journal_copy, "encode", fail_once)
        losses = await train(head, 1, 4)
        assert failed.is_set()
        await until(lambda: described(head).is_durable)

    with training(tmp_path, config, "g2") as head:
        await head.resume("g1")
        assert [await head.loss(1), await head.loss(3)] == losses


async def test_if_too_much_waits_in_a_head_the_run_with_most_of_it_gives_way(
    tmp_path: Path, store: Store
) -> None:
    config = DurabilityConfig(
        level="remote", store_timeout_seconds=PATIENCE_SECONDS, max_waiting_bytes=25_000
    )
    sequences = [[5, 6, 7, 8]] * 60
    with training(tmp_path, config, "g1") as small:
        large = replace(small, model=ModelId("s", 1))
        for head in (small, large):
            await head.begin()
        store.hold()
        small.add_all(1, sequences)
        await store.was_asked.wait()
        # Of 4070 bytes each: neither run has too much alone.
        for seq_id in range(2, 4):
            small.add_all(seq_id, sequences)
        for seq_id in range(1, 7):
            large.add_all(seq_id, sequences)
        await large.confirmed()

        degraded = {each.model_id: str(each.degraded) for each in small.service.held()}
        assert "max_waiting_bytes" in degraded[str(large.model)]
        assert degraded[str(small.model)] == "None"
        store.responds.set()
        await until(lambda: all(each.is_durable for each in small.service.held()))


async def test_a_disk_is_never_replaced_by_an_older_copy_whose_indexes_it_has_used_again(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DurabilityConfig(level="remote", store_timeout_seconds=0.5, snapshot_steps=5)
    copies = tmp_path / f"store/journals/runs/{MODEL}/suspended"
    disk = tmp_path / "g1"
    with training(tmp_path, config, "g1") as head:
        await head.begin()
        await train(head, 1, 10)
        # A snapshot has all requests, so the local journal has none.
        await until(lambda: any(copies.glob(f"*/{BODIES}")) and not list(disk.rglob("*.log")))
    later = config.model_copy(update={"snapshot_steps": 1000})
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g2", journals=disk, durability=later) as head:
        store.hold()
        await head.resume("g1")
        losses = await train(head, 11, 12)

        async def fail(_: SharedLog) -> list[str]:
            raise StoreFailed("the checkpoint store did not respond")

        with monkeypatch.context() as patch:
            # The head can take over the copy, and not replace it.
            patch.setattr(SharedLog, "snapshot_keys", fail)
            log = SharedLog(open_store((tmp_path / "store" / FOLDER).as_uri()), str(MODEL), 10)
            store.responds.set()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (last := await log.last()) is None or (  # noqa: ASYNC110 - there is no event for it
                    last[1].manifest.generations[-1] != "g2"
                ):
                    await asyncio.sleep(0.05)
            losses += await train(head, 13, 14)
            head.service.close()
    with a_head(root, tmp_path, "g3", journals=disk, durability=later) as head:
        await head.resume("g2")
        assert [await head.loss(11), await head.loss(13)] == losses
        await until(lambda: described(head).is_durable)


@pytest.mark.long
async def test_a_store_that_fails_while_a_snapshot_is_copied_stops_no_local_snapshots(
    tmp_path: Path, store: Store
) -> None:
    config = DurabilityConfig(level="remote", store_timeout_seconds=0.5, snapshot_steps=1)
    with training(tmp_path, config, "g1") as head:
        await head.begin()
        store.hold()
        await train(head, 1, 2)
        folder, losses, last = JournalFolder(tmp_path / "g1", str(MODEL)), list[float](), 3
        async with asyncio.timeout(PATIENCE_SECONDS):
            # Each snapshot begins another segment.
            while max(folder.numbers(), default=0) < 5:
                losses, last = await train(head, last, last), last + 2
        store.responds.set()
        await until(lambda: described(head).is_durable)

    with training(tmp_path, config, "g2") as head:
        await head.resume("g1")
        assert await head.loss(last - 2) == losses[-1]


async def test_a_run_that_is_deleted_while_it_is_resumed_leaves_nothing_behind(
    tmp_path: Path, store: Store
) -> None:
    config = DurabilityConfig(level="remote", store_timeout_seconds=PATIENCE_SECONDS)
    with training(tmp_path, config, "g1") as head:
        await head.begin()
        await train(head, 1, 2)
    root, disk = (tmp_path / "store").as_uri(), tmp_path / "g1"
    with a_head(root, tmp_path, "g2", journals=disk, durability=config) as head:
        store.hold()
        resuming = asyncio.ensure_future(head.resume("g1"))
        # It is taking over the copy.
        await store.was_asked.wait()
        await head.service.delete_model(MODEL)
        await asyncio.wait({resuming})
        assert not head.service.durability.states()
        assert not [path for path in disk.rglob("*") if path.is_file()]
