"""All journals and snapshots of a head share the room on its disk; the largest run gives way."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_testing.serving.bare_heads import (
    MODEL,
    SPEC,
    Head,
    a_head,
    described,
    train,
    until,
)
from tinkercloud_worker.head.durable.journal_room import (
    JournalRoom,
    NoRoom,
    RoomShare,
    num_bytes_in,
)

pytestmark = pytest.mark.timeout(120)

LIMIT = 100
ROOM = DurabilityConfig(max_disk_bytes=LIMIT)
OTHER = ModelId("t", 0)


class Runs:
    """Runs of two owners, a and b, that share a room."""

    def __init__(self) -> None:
        self.room = JournalRoom(Path(), ROOM)
        self.shares: dict[str, RoomShare] = {}
        self.gave_way: list[str] = []
        for name in ("a1", "a2", "b1"):
            share = self.shares[name] = self.room.share(name, owner=name[0])
            share.give_way = partial(self._end, name)

    def _end(self, name: str, _: str) -> None:
        self.gave_way.append(name)
        self.shares[name].cleared()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a1", "a2", "b1"]),
            st.sampled_from(["journal", "stage", "commit", "discard"]),
            st.integers(0, 60),
        ),
        max_size=40,
    )
)
def test_nothing_that_runs_write_exceeds_the_room(
    changes: list[tuple[str, str, int]],
) -> None:
    runs = Runs()
    for name, change, num_bytes in changes:
        share, count = runs.shares[name], len(runs.gave_way)
        if change == "journal":
            share.set_journal(num_bytes)
        elif change == "stage":
            try:
                share.stage(num_bytes)
            except NoRoom:
                share.discarded()
        elif change == "commit":
            share.committed()
        else:
            share.discarded()
        assert runs.room.used_bytes <= LIMIT
        assert len(runs.gave_way) == count or change == "journal"


def test_the_owner_with_the_most_gives_way_not_the_one_with_the_largest_run() -> None:
    runs = Runs()
    runs.shares["a1"].set_journal(40)
    runs.shares["a2"].set_journal(35)

    runs.shares["b1"].set_journal(50)

    assert runs.gave_way == ["a1"]
    assert runs.shares["b1"].num_bytes == 50


def test_a_run_that_no_head_trains_is_counted_but_keeps_its_files() -> None:
    room, reasons = JournalRoom(Path(), ROOM), list[str]()
    kept = room.share("kept", "me")
    kept.found(60, 30)
    running = room.share("running", "me")

    def give_way(reason: str) -> None:
        reasons.append(reason)
        running.cleared()

    running.give_way = give_way
    running.set_journal(11)

    assert kept.num_bytes == 90
    assert running.num_bytes == 0
    (reason,) = reasons
    assert "101 bytes, of which 11 are this run's" in reason
    assert "the limit is 100 (durability.max_disk_bytes" in reason


async def test_a_run_that_needs_too_much_room_trains_on_and_leaves_the_others_durable(
    tmp_path: Path,
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "undisturbed") as head:
        await head.begin()
        expected = await train(head, 1, 12)

    limit = 40_000
    config = DurabilityConfig(max_disk_bytes=limit, snapshot_steps=1000)
    with a_head(root, tmp_path, "g1", journals=journals, durability=config) as head:
        await head.begin()
        await head.service.create_model(OTHER, SPEC.model_copy(update={"owner": "flood"}))
        flood = replace(head, model=OTHER)
        losses, seq_id = await train(head, 1, 4), 1
        while durable(head, OTHER):
            flood.add_all(seq_id, [list(range(100))] * 10)
            flood.apply(seq_id + 1)
            await flood.answer(seq_id + 1)
            seq_id += 2
            assert num_bytes_in(journals) <= 1.5 * limit
        assert "durability.max_disk_bytes" in str(reason_of(head, OTHER))
        assert durable(head, MODEL)
        await until(lambda: num_bytes_in(journals / f"runs/{OTHER}") < limit // 2)
        losses += await train(head, 5, 8)

    with a_head(root, tmp_path, "g2", journals=journals, durability=config) as head:
        await head.resume("g1")
        losses += await train(head, 9, 12)
    assert losses == expected


async def test_a_snapshot_without_room_is_refused_by_name_and_the_journal_stays(
    tmp_path: Path,
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    config = DurabilityConfig(max_disk_bytes=8_000, snapshot_steps=2)
    with a_head(root, tmp_path, "g1", journals=journals, durability=config) as head:
        await head.begin()
        expected = await train(head, 1, 8)
        await until(lambda: "its next snapshot needs" in str(described(head).degraded))
        assert not list(journals.glob("runs/*/suspended/manifest.json"))
    with a_head(root, tmp_path, "g2", journals=journals, durability=config) as head:
        await head.resume("g1")
        assert await train(head, 1, 8) == expected


def reason_of(head: Head, model: ModelId) -> str | None:
    (held,) = [each for each in head.service.held() if each.model_id == str(model)]
    return held.degraded


def durable(head: Head, model: ModelId) -> bool:
    return reason_of(head, model) is None


def test_files_of_a_snapshot_that_is_being_written_make_only_others_give_way() -> None:
    runs = Runs()
    runs.shares["a1"].set_journal(5)
    runs.shares["a1"].stage(60)
    runs.shares["b1"].set_journal(36)
    assert runs.gave_way == ["a1"]

    runs.shares["b1"].set_journal(101)

    assert runs.gave_way == ["a1", "b1"]


def test_a_snapshot_that_was_refused_is_measured_again_with_the_next_attempt() -> None:
    share = Runs().shares["a1"]
    with pytest.raises(NoRoom, match="its next snapshot needs 110 more"):
        share.stage(LIMIT + 10)
    with pytest.raises(NoRoom):
        share.check_snapshot()

    share.check_snapshot()


async def test_what_a_killed_head_left_of_an_unfinished_snapshot_is_deleted(
    tmp_path: Path,
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    config = DurabilityConfig(max_disk_bytes=1 << 20, snapshot_steps=2)
    with a_head(root, tmp_path, "g1", journals=journals, durability=config) as head:
        await head.begin()
        expected = await train(head, 1, 4)
        suspended = journals / f"runs/{MODEL}/suspended"
        await until((suspended / "manifest.json").exists)
    before = {path for path in suspended.rglob("*") if path.is_file()}
    (suspended / "other").mkdir()
    (suspended / "other/weights.safetensors").write_bytes(b"part")
    withdrawn = journals / "runs/withdrawn/journal/00000001.log"
    withdrawn.parent.mkdir(parents=True)
    withdrawn.write_bytes(b"part")

    with a_head(root, tmp_path, "g2", journals=journals, durability=config) as head:
        await head.resume("g1")
        assert {path for path in suspended.rglob("*") if path.is_file()} == before
        assert not withdrawn.exists()
        expected += await train(head, 5, 6)
    with a_head(root, tmp_path, "undisturbed") as head:
        await head.begin()
        assert await train(head, 1, 6) == expected


@given(
    state=st.integers(1, 30),
    journal=st.integers(0, 10),
    sizes=st.lists(st.integers(1, 20), max_size=30),
)
def test_samplers_leave_room_for_the_next_snapshot(
    state: int, journal: int, sizes: list[int]
) -> None:
    share = JournalRoom(Path(), ROOM.model_copy(update={"max_journal_bytes": 20})).share("a", "me")
    share.set_journal(journal)
    for _ in range(5):
        share.stage(state)
        left = share.sampler_bytes()
        assert left is not None
        for size in sizes:
            if size <= left:
                share.stage(size)
                left -= size
        share.committed()
        share.set_journal(journal)


async def test_a_run_with_more_samplers_than_room_stays_durable_and_keeps_the_latest(
    tmp_path: Path,
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    config = DurabilityConfig(max_disk_bytes=200_000, max_journal_bytes=30_000, snapshot_steps=1)
    with a_head(root, tmp_path, "g1", journals=journals, durability=config) as head:
        await head.begin()
        for seq_id in range(1, 121, 3):
            await train(head, seq_id, seq_id + 1)
            head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, seq_id + 2, sampling_session_seq_id=seq_id)
            await head.answer(seq_id + 2)
        await until((journals / f"runs/{MODEL}/suspended/manifest.json").exists)
        await until(lambda: described(head).is_durable)
        expected = await head.drawn(118, 1)
    with a_head(root, tmp_path, "g2", journals=journals, durability=config) as head:
        await head.resume("g1")
        assert await head.drawn(118, 1) == expected
