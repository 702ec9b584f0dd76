"""Who may write, read and delete a shared journal: the head that continues the run, for its owner.

Heads are real. A stale one is one that still runs although another has taken over from it.
"""

import asyncio
import shutil
from pathlib import Path

import pytest

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.journal_copy import FOLDER, Base, Header, object_key
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire.errors import StateLost, WireError
from tinkercloud_testing.serving.bare_heads import MODEL, PATIENCE_SECONDS, SPEC, a_head, train
from tinkercloud_worker.head.wire.failed_results import Moved
from tinkercloud_worker.journal.shared_log import SharedLog

pytestmark = pytest.mark.timeout(120)

CONFIG = DurabilityConfig(level="remote", snapshot_steps=3)


async def expected(folder: Path, last: int) -> list[float]:
    """Return the losses of a head that nobody kills."""
    with a_head((folder / "store").as_uri(), folder, "undisturbed") as head:
        await head.begin()
        return await train(head, 1, last)


def shared(folder: Path) -> SharedLog:
    return SharedLog(open_store((folder / "store" / FOLDER).as_uri()), str(MODEL), 10)


async def until_replaced(log: SharedLog, number: int) -> None:
    """Return once snapshots have replaced an object."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while number in await log.numbers():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.05)


async def test_a_stale_head_stops_however_late_it_writes(tmp_path: Path) -> None:
    wanted, log = await expected(tmp_path, 16), shared(tmp_path)
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as stale:
        await stale.begin()
        losses = await train(stale, 1, 2)
        last_of_stale = (await log.numbers())[-1]
        with a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head:
            await head.resume("g1")
            losses += await train(head, 3, 14)
            await until_replaced(log, last_of_stale + 2)

            stale.add(3, first=9)
            with pytest.raises(Moved):
                await stale.confirmed()
            assert not stale.service.held()

    with a_head(root, tmp_path, "g3", journals=tmp_path / "3", durability=CONFIG) as head:
        await head.resume("g2")
        assert losses + await train(head, 15, 16) == wanted


async def test_a_stale_head_that_is_stopped_leaves_the_journal_of_its_successor(
    tmp_path: Path,
) -> None:
    wanted = await expected(tmp_path, 6)
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as stale:
        await stale.begin()
        losses = await train(stale, 1, 2)
        with a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head:
            await head.resume("g1")
            losses += await train(head, 3, 4)
            await stale.service.suspend()

    with a_head(root, tmp_path, "g3", journals=tmp_path / "3", durability=CONFIG) as head:
        await head.resume("g2")
        assert losses + await train(head, 5, 6) == wanted


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "stopping"])
async def test_a_stale_head_does_not_replace_what_its_successor_has_suspended(
    tmp_path: Path, is_idle: bool
) -> None:
    wanted = await expected(tmp_path, 6)
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as stale:
        await stale.begin()
        losses = await train(stale, 1, 2)
        with a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head:
            await head.resume("g1")
            losses += await train(head, 3, 4)
            await head.service.suspend()
        if is_idle:
            assert not await stale.service.suspend_model(MODEL)
        else:
            await stale.service.suspend()
        assert not stale.service.held()

    with a_head(root, tmp_path, "g3", journals=tmp_path / "3", durability=CONFIG) as head:
        await head.resume("g2")
        assert losses + await train(head, 5, 6) == wanted


async def test_a_stale_head_that_is_to_give_its_run_away_has_done_so(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as stale:
        await stale.begin()
        await train(stale, 1, 2)
        with a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head:
            await head.resume("g1")

            await stale.service.move_model(MODEL)

            assert not stale.service.held()
            with pytest.raises(Moved):
                await stale.service.recall(str(MODEL))


async def test_a_stale_head_writes_no_state_while_its_successor_trains(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as stale:
        await stale.begin()
        await train(stale, 1, 2)
        with a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head:
            await head.resume("g1")
            await stale.service.suspend()
            assert await head.backend.store.find_suspended(str(MODEL)) is None


async def test_a_stale_head_with_waiting_requests_can_be_stopped(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as stale:
        await stale.begin()
        await train(stale, 1, 2)
        with a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head:
            await head.resume("g1")
            stale.add(3, first=9)
            await stale.service.suspend()
            assert await shared(tmp_path).numbers()


@pytest.mark.parametrize("disk", ["1", "2"], ids=["same disk", "empty disk"])
async def test_a_journal_is_never_read_for_another_owner(tmp_path: Path, disk: str) -> None:
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as owners:
        await owners.begin()
        await train(owners, 1, 2)
        stranger = SPEC.model_copy(update={"owner": "stranger", "resume_generation": "g1"})

        with (
            a_head(root, tmp_path, "g2", journals=tmp_path / disk, durability=CONFIG) as head,
            pytest.raises(StateLost, match="another configuration"),
        ):
            await head.service.create_model(MODEL, stranger)

        assert not list((tmp_path / "2").rglob("*.log"))
        # Its owner's head has noticed nothing.
        assert len(await train(owners, 3, 4)) == 1


async def test_a_torn_object_is_never_read(tmp_path: Path) -> None:
    log, root = shared(tmp_path), (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as head:
        await head.begin()
        await train(head, 1, 2)
    path = tmp_path / "store" / FOLDER / object_key(str(MODEL), (await log.numbers())[-1])
    content = path.read_bytes()

    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(WireError):
            await log.read()


async def test_an_upload_that_was_not_finished_changes_nothing(tmp_path: Path) -> None:
    wanted, log = await expected(tmp_path, 4), shared(tmp_path)
    root = (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as head:
        await head.begin()
        losses = await train(head, 1, 2)
    number = (await log.numbers())[-1]
    path = tmp_path / "store" / FOLDER / object_key(str(MODEL), number)
    content = path.read_bytes()
    path.with_name(f"{number + 1:010d}.5b1f").write_bytes(content[: len(content) // 2])

    with a_head(root, tmp_path, "g2", journals=tmp_path / "2", durability=CONFIG) as head:
        await head.resume("g1")
        assert losses + await train(head, 3, 4) == wanted


async def test_requests_that_only_the_store_has_leave_no_gap_on_the_disk(tmp_path: Path) -> None:
    wanted = await expected(tmp_path, 8)
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "1"
    config = CONFIG.model_copy(update={"snapshot_steps": 1000})
    with a_head(root, tmp_path, "g1", journals=journals, durability=config) as head:
        await head.begin()
        losses = await train(head, 1, 2)
        shutil.copytree(journals, tmp_path / "behind")
        head.add(3, first=5 + 3)
        await head.confirmed()
    # The head was killed after it had copied the last request, and before its disk had it.
    shutil.rmtree(journals)
    (tmp_path / "behind").rename(journals)

    with a_head(root, tmp_path, "g2", journals=journals, durability=config) as head:
        await head.resume("g1")
        assert head.service.status().durability == "remote"
        losses += await train(head, 3, 4)
    with a_head(root, tmp_path, "g3", journals=journals, durability=config) as head:
        await head.resume("g2")
        losses += await train(head, 5, 6)
        assert head.service.status().durability == "remote"
    with a_head(root, tmp_path, "g4", journals=tmp_path / "4", durability=config) as head:
        await head.resume("g3")
        assert losses + await train(head, 7, 8) == wanted


async def test_what_a_successor_writes_while_a_journal_is_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, root = shared(tmp_path), (tmp_path / "store").as_uri()
    with a_head(root, tmp_path, "g1", journals=tmp_path / "1", durability=CONFIG) as head:
        await head.begin()
        await train(head, 1, 2)
        _, header = await log.last() or pytest.fail("there is no journal")
        successors = header.manifest.model_copy(update={"generations": ["g1", "g2"]})
        read_header = SharedLog._header

        async def read_slowly(asked: SharedLog, number: int) -> Header:
            found = await read_header(asked, number)
            monkeypatch.undo()
            await log.take_over(successors, Base(snapshot=None, first_index=0))
            return found

        monkeypatch.setattr(SharedLog, "_header", read_slowly)
        await log.delete("g1")
        _, left = await log.last() or pytest.fail("the journal of the successor was deleted")
        assert left.manifest == successors
        await log.delete("g1")
        assert await log.numbers()
        await log.delete("g2")
        assert not [path for path in (tmp_path / "store/journals").rglob("*") if path.is_file()]
