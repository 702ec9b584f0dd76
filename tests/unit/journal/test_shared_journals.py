"""With `remote`, a head without any local file continues a run from the object store."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import StateLost, WireError
from tinkercloud_testing.serving.bare_heads import MODEL, Head, a_head, described, until
from tinkercloud_worker.checkpoints.store import StoreFailed
from tinkercloud_worker.head.wire.failed_results import Moved
from tinkercloud_worker.journal.shared_log import SharedLog

pytestmark = pytest.mark.timeout(120)

CONFIG = DurabilityConfig(level="remote", snapshot_steps=3)


@contextmanager
def store_away() -> Iterator[None]:
    """Fail all writes of shared journals, as a store that does not respond does."""

    async def fail(*_: object, **__: object) -> Any:
        raise StoreFailed("the checkpoint store did not respond within 10 s")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("append", "numbers", "snapshot_keys"):
            patch.setattr(SharedLog, name, fail)
        yield


async def train(head: Head, first: int, last: int) -> list[float]:
    """Run steps of two requests each, which reach the store one by one; return their losses."""
    losses = []
    for seq_id in range(first, last + 1, 2):
        head.add(seq_id, first=5 + seq_id)
        await head.confirmed()
        head.apply(seq_id + 1)
        await head.confirmed()
        losses.append(await head.loss(seq_id))
        await head.answer(seq_id + 1)
    return losses


def objects(folder: Path) -> list[Path]:
    return sorted((folder / "store/journals").glob(f"runs/{MODEL}/journal/*"))


async def expected(folder: Path, last: int) -> list[float]:
    """Return the losses of a head that nobody kills."""
    with a_head((folder / "store").as_uri(), folder, "undisturbed") as head:
        await head.begin()
        return await train(head, 1, last)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
async def test_a_head_with_an_empty_disk_gives_the_same_answers(tmp_path: Path, steps: int) -> None:
    wanted = await expected(tmp_path, 2 * steps + 2)
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as head:
        await head.begin()
        losses = await train(head, 1, 2 * steps)
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 2 * steps + 1, sampling_session_seq_id=1)
        await head.confirmed()
        await head.answer(2 * steps + 1)
        drawn = await head.drawn(1, 1)
        answers = [await head.answer(seq_id) for seq_id in range(2 * steps + 2)]
        assert head.service.status().durability == "remote"

    for generation in ("g2", "g3"):
        before = f"g{int(generation[1]) - 1}"
        with a_head(
            root, tmp_path, generation, journals=tmp_path / generation, durability=CONFIG
        ) as head:
            await head.resume(before)
            assert await head.drawn(1, 1) == drawn
            for seq_id in range(1, 2 * steps + 2):
                assert await head.answer(seq_id) == answers[seq_id]
            assert described(head).is_durable
    with a_head(root, tmp_path, "g4", journals=tmp_path / "4", durability=CONFIG) as head:
        await head.resume("g3")
        head.add(2 * steps + 2, first=5 + 2 * steps + 1)
        assert [*losses, await head.loss(2 * steps + 2)] == wanted


async def test_a_head_that_was_replaced_can_neither_write_nor_answer(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as old:
        await old.begin()
        await train(old, 1, 2)
        with a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as new:
            await new.resume("g1")
            old.add(3, first=9)
            answer = asyncio.ensure_future(old.answer(3))
            confirmed = asyncio.ensure_future(old.confirmed())
            await until(lambda: not old.service.held())
            with pytest.raises((WireError, AssertionError)):
                await answer
            with pytest.raises(Moved):
                await confirmed

            before = objects(tmp_path)
            new.add(3, first=8)
            await new.confirmed()
            await new.loss(3)
            assert set(before) < set(objects(tmp_path))
            losses = await train(new, 5, 4)
            assert losses == []

    with a_head(root, tmp_path, "g3", journals=tmp_path / "3", durability=CONFIG) as head:
        await head.resume("g2")
        assert await head.answer(3)


async def test_snapshots_replace_the_objects_before_them(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as head:
        await head.begin()
        await train(head, 1, 40)
        await until(lambda: objects(tmp_path)[0].name > "0000000020")
        assert described(head).is_durable
        folder = tmp_path / f"store/journals/runs/{MODEL}/suspended"
        await until(lambda: len(list(folder.iterdir())) <= 2)
        await head.service.delete_model(MODEL)
    assert not [path for path in (tmp_path / "store/journals").rglob("*") if path.is_file()]


async def test_a_store_that_is_away_stops_no_training_and_gets_everything_later(
    tmp_path: Path,
) -> None:
    wanted = await expected(tmp_path, 12)
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as head:
        await head.begin()
        losses = await train(head, 1, 2)
        with store_away():
            losses += await train(head, 3, 8)
            assert head.service.status().durability == "degraded"
            assert "did not respond" in str(described(head).degraded)
        await until(lambda: described(head).is_durable)
        losses += await train(head, 9, 10)
    with a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head:
        await head.resume("g1")
        assert losses + await train(head, 11, 12) == wanted


async def test_requests_that_cannot_wait_for_the_store_are_replaced_by_a_snapshot(
    tmp_path: Path,
) -> None:
    wanted = await expected(tmp_path, 12)
    root = (tmp_path / "store").as_uri()
    config = CONFIG.model_copy(update={"max_waiting_bytes": 300, "snapshot_steps": 1000})
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=config) as head:
        await head.begin()
        losses = await train(head, 1, 2)
        with store_away():
            losses += await train(head, 3, 8)
            assert "slower" in str(described(head).degraded)
        await until(lambda: described(head).is_durable)
        losses += await train(head, 9, 10)
    with a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=config) as head:
        await head.resume("g1")
        assert losses + await train(head, 11, 12) == wanted


async def test_a_run_that_began_without_the_store_is_copied_later(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    wanted = await expected(tmp_path, 6)
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as head:
        with store_away():
            await head.begin()
            losses = await train(head, 1, 2)
            assert described(head).degraded
        await until(lambda: described(head).is_durable)
        losses += await train(head, 3, 4)
    with a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head:
        await head.resume("g1")
        assert losses + await train(head, 5, 6) == wanted


async def test_a_restarted_container_continues_its_disk_and_the_store(tmp_path: Path) -> None:
    wanted = await expected(tmp_path, 10)
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as head:
        await head.begin()
        losses = await train(head, 1, 2)
        with store_away():
            # Only the disk has these.
            losses += await train(head, 3, 4)
    with a_head(root, tmp_path, "g2", journals=tmp_path / "1", durability=CONFIG) as head:
        await head.resume("g1")
        losses += await train(head, 5, 8)
        await until(lambda: described(head).is_durable)
    with a_head(root, tmp_path, "g3", journals=tmp_path / "3", durability=CONFIG) as head:
        await head.resume("g2")
        assert losses + await train(head, 9, 10) == wanted


@pytest.mark.parametrize("is_away", [False, True], ids=["copied", "store away"])
async def test_a_run_that_was_suspended_continues_from_its_state(
    tmp_path: Path, is_away: bool
) -> None:
    wanted = await expected(tmp_path, 8)
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as head:
        await head.begin()
        losses = await train(head, 1, 4)
        await head.service.suspend()
    assert not objects(tmp_path)
    with (
        store_away() if is_away else nullcontext(),
        a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head,
    ):
        await head.resume("g1")
        assert bool(described(head).degraded) == is_away
        losses += await train(head, 5, 6)
    journals = tmp_path / ("2" if is_away else "3")
    with a_head(root, tmp_path, "g3", journals=journals, durability=CONFIG) as head:
        await head.resume("g2")
        assert losses + await train(head, 7, 8) == wanted


async def test_a_damaged_object_is_named(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as head:
        await head.begin()
        await train(head, 1, 2)
    damaged = objects(tmp_path)[1]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)

    with (
        a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head,
        pytest.raises(WireError, match=f"object 2 of the journal of training run {MODEL}"),
    ):
        await head.resume("g1")


@pytest.mark.parametrize("damaged", ["segment", "manifest of the snapshot", "snapshot"])
async def test_a_damaged_disk_is_replaced_by_the_copy(tmp_path: Path, damaged: str) -> None:
    wanted = await expected(tmp_path, 10)
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "1"
    with a_head(root, tmp_path, "g1", journals=journals, durability=CONFIG) as head:
        await head.begin()
        losses = await train(head, 1, 6)
        await until(lambda: any(objects(tmp_path)) and any(journals.rglob("suspended/*/*")))
        await until(lambda: head.service.held()[0].is_durable)
        losses += await train(head, 7, 8)
    patterns = {"segment": "*.log", "manifest of the snapshot": "suspended/*.json"}
    for path in journals.rglob(patterns.get(damaged, "suspended/*/*")):
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1
        path.write_bytes(content)

    with a_head(root, tmp_path, "g2", journals=journals, durability=CONFIG) as head:
        await head.resume("g1")
        assert losses + await train(head, 9, 10) == wanted


async def test_a_copy_that_cannot_be_read_is_replaced_by_the_disk(tmp_path: Path) -> None:
    wanted = await expected(tmp_path, 6)
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "1"
    with a_head(root, tmp_path, "g1", journals=journals, durability=CONFIG) as head:
        await head.begin()
        losses = await train(head, 1, 2)
    objects(tmp_path)[-1].write_bytes(b"broken")

    with a_head(root, tmp_path, "g2", journals=journals, durability=CONFIG) as head:
        await head.resume("g1")
        losses += await train(head, 3, 4)
        await until(lambda: described(head).is_durable)
    with a_head(root, tmp_path, "g3", journals=tmp_path / "3", durability=CONFIG) as head:
        await head.resume("g2")
        assert losses + await train(head, 5, 6) == wanted


async def test_without_a_copy_the_run_is_lost(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    local = DurabilityConfig(level="local")
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=local) as head:
        await head.begin()
        await train(head, 1, 2)
    with (
        a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head,
        pytest.raises(StateLost, match="left no journal"),
    ):
        await head.resume("g1")
