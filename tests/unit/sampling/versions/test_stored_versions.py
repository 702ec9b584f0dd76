"""Unnamed snapshots for which a head has no room return from the checkpoint store by themselves."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.launch import Limits
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId
from tinkercloud_protocol.wire.paths import evicted_prefix
from tinkercloud_testing.serving.bare_heads import MODEL, SPEC, Head, a_head, samplers_of, until
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.engines import an_engine
from tinkercloud_worker.checkpoints.store import CheckpointStore, StoreFailed
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.head.durable.snapshots import Snapshot, Snapshots
from tinkercloud_worker.head.sampling import evicted_weights
from tinkercloud_worker.head.sampling.evicted_weights import EvictedWeights

NAME = str(MODEL)
MANY = 1 << 30


@pytest.fixture(scope="module")
def size(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of a snapshot in memory; its file is a little larger."""
    with an_engine(tiny_llama(), tmp_path_factory.mktemp("engine")) as engine:
        engine.trainer.add_model("one", SPEC.lora)
        return engine.trainer.copy_weights("one").size_bytes


@contextmanager
def a_small_head(
    folder: Path,
    size: int,
    generation: str = "g1",
    stored: int = MANY,
    durability: DurabilityConfig | None = None,
) -> Iterator[Head]:
    """Run a head with room for one snapshot, which is the latest one of its model."""
    with a_head(
        (folder / "store").as_uri(),
        folder,
        generation,
        limits=Limits(max_snapshot_bytes=size * 3 // 2, max_stored_snapshot_bytes=stored),
        journals=folder / "journals" if durability is not None else None,
        durability=durability,
    ) as head:
        yield head


@pytest.fixture
async def head(tmp_path: Path, size: int) -> AsyncIterator[Head]:
    with a_small_head(tmp_path, size) as running:
        await running.begin()
        yield running


async def train(head: Head, first: int, last: int) -> dict[int, list[int]]:
    """Train and publish a snapshot after each step; return what each draws while it is the latest.

    Step N has requests 3N - 2 to 3N, and snapshot N.
    """
    drawn = {}
    for step in range(first, last + 1):
        head.add(3 * step - 2)
        head.apply(3 * step - 1)
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 3 * step, sampling_session_seq_id=step)
        assert b"sampling_session_id" in await head.answer(3 * step)
        drawn[step] = await head.drawn(step, 0)
    return drawn


def files(folder: Path) -> list[Path]:
    """Return the files of evicted snapshots."""
    return [*(folder / "store" / evicted_prefix(NAME)).glob("*")]


async def failure(head: Head, session: int, seq_id: int) -> str:
    """Return why a snapshot can't be sampled."""
    result = await head.service.retrieve(head.sample(session, seq_id))
    assert result is not None
    answer: dict[str, str] = orjson.loads(result.body)
    assert answer["category"] == "user"
    return answer["error"]


async def test_every_evicted_snapshot_draws_what_it_drew_before(head: Head) -> None:
    drawn = await train(head, 1, 4)
    assert len({str(each) for each in drawn.values()}) == 4
    with pytest.raises(NotFound):
        await head.backend.sampler.export("s:sample:1")

    for seq_id in (1, 2):
        assert {step: await head.drawn(step, seq_id) for step in drawn} == drawn


async def test_a_sample_that_arrives_while_its_snapshot_is_evicted_waits_for_it(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    evicting, may_export, export = asyncio.Event(), asyncio.Event(), head.backend.sampler.export

    async def wait_and_export(name: str) -> WeightsCopy | None:
        evicting.set()
        await may_export.wait()
        return await export(name)

    drawn = await train(head, 1, 1)
    monkeypatch.setattr(head.backend.sampler, "export", wait_and_export)
    training = asyncio.create_task(train(head, 2, 2))
    await evicting.wait()
    sampling = asyncio.create_task(head.drawn(1, 1))
    # Long enough for a sample that does not wait to fail.
    await asyncio.sleep(0.2)
    may_export.set()

    assert await sampling == drawn[1]
    await training


async def test_a_snapshot_that_returned_does_not_count_as_the_latest(head: Head) -> None:
    drawn = await train(head, 1, 2)

    assert await head.drawn(1, 1) == drawn[1]

    assert await head.backend.sampler.export("s:sample:2") is not None


async def test_beyond_the_limit_of_the_store_the_first_are_lost_and_the_error_says_what_to_do(
    tmp_path: Path, size: int
) -> None:
    with a_small_head(tmp_path, size, stored=3 * size) as head:
        await head.begin()
        drawn = await train(head, 1, 4)

        assert await head.drawn(2, 1) == drawn[2]
        assert await head.drawn(3, 1) == drawn[3]
        assert "save them under a name" in await failure(head, 1, 1)


async def test_an_owner_with_many_snapshots_does_not_drive_out_those_of_others(
    head: Head, size: int
) -> None:
    await train(head, 1, 1)
    weights = await head.backend.sampler.export("s:sample:1")
    assert weights is not None
    evicted = EvictedWeights(head.backend.store, max_bytes=4 * size)

    for session, owner in (
        ("s:sample:90", "small"),
        *((f"m:sample:{n}", "many") for n in range(6)),
    ):
        evicted.begin(session, NAME, owner, weights)
        assert await evicted.ready()

    assert set(evicted.sizes()) == {"small", "many"}
    assert [each for each in range(6) if f"m:sample:{each}" in evicted] == [4, 5]
    assert "s:sample:90" in evicted


async def test_evicted_snapshots_return_in_the_next_head_and_after_a_pause(
    head: Head, tmp_path: Path, size: int
) -> None:
    drawn = await train(head, 1, 3)
    assert await head.service.suspend_model(MODEL)
    await head.service.recall(NAME)
    assert await head.drawn(1, 1) == drawn[1]
    await head.service.suspend()

    with a_small_head(tmp_path, size, "g2") as after:
        await after.resume("g1")

        assert {step: await after.drawn(step, 2) for step in drawn} == drawn


async def test_a_run_is_suspended_although_a_snapshot_is_evicted_while_it_is_written(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(max_snapshot_bytes=size * 5 // 2, max_stored_snapshot_bytes=MANY)
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1", limits=limits) as head:
        await head.begin()
        drawn = await train(head, 1, 2)
        other, export = replace(head, model=ModelId("s", 1)), head.backend.sampler.export
        await other.begin()

        async def evict_and_export(version: str) -> WeightsCopy | None:
            monkeypatch.undo()
            other.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, sampling_session_seq_id=3)
            await other.answer(1)
            with pytest.raises(NotFound):
                await export("s:sample:1")
            return await export(version)

        monkeypatch.setattr(head.backend.sampler, "export", evict_and_export)
        assert await head.service.suspend_model(MODEL)
        await head.service.recall(NAME)

        assert {step: await head.drawn(step, 1) for step in drawn} == drawn


async def test_the_file_of_a_deleted_session_is_deleted(head: Head, tmp_path: Path) -> None:
    await train(head, 1, 3)
    await head.drawn(1, 1)

    for step in (1, 2):
        await head.service.retire_sampler(SamplingSessionId("s", step))

    assert files(tmp_path) == []
    assert "is unknown" in await failure(head, 2, 1)


async def test_a_store_that_fails_costs_evicted_snapshots_but_no_training(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise StoreFailed("no space")

    with monkeypatch.context() as full:
        full.setattr(CheckpointStore, "put_evicted", fail)
        drawn = await train(head, 1, 3)

    assert await head.drawn(3, 1) == drawn[3]
    assert "were evicted" in await failure(head, 1, 1)


@pytest.fixture
def may_store(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """No evicted weights are stored until this is set."""
    put, may_continue = CheckpointStore.put_evicted, asyncio.Event()

    async def slowly(store: CheckpointStore, key: str, content: bytes) -> object:
        await may_continue.wait()
        return await put(store, key, content)

    monkeypatch.setattr(CheckpointStore, "put_evicted", slowly)
    return may_continue


async def test_samples_that_arrive_while_a_snapshot_is_being_stored_wait_for_it(
    head: Head, may_store: asyncio.Event
) -> None:
    drawn = await train(head, 1, 2)
    waiting = asyncio.create_task(head.drawn(1, 1))
    await asyncio.sleep(0)

    may_store.set()

    assert await waiting == drawn[1]


async def test_weights_that_are_being_stored_while_the_run_is_copied_survive_a_killed_head(
    tmp_path: Path, size: int, may_store: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, write = Snapshots.take, Snapshots.write
    taken, written = asyncio.Event(), asyncio.Event()

    async def take_and_say(snapshots: Snapshots) -> Snapshot:
        snapshot = await take(snapshots)
        taken.set()
        return snapshot

    async def write_and_say(snapshots: Snapshots, snapshot: Snapshot) -> SuspendedManifest:
        manifest = await write(snapshots, snapshot)
        written.set()
        return manifest

    monkeypatch.setattr(Snapshots, "take", take_and_say)
    monkeypatch.setattr(Snapshots, "write", write_and_say)
    durability = DurabilityConfig(snapshot_steps=3)
    with a_small_head(tmp_path, size, durability=durability) as head:
        await head.begin()
        drawn = await train(head, 1, 2)
        head.add(7)
        head.apply(8)
        await taken.wait()
        may_store.set()
        await written.wait()

    with a_small_head(tmp_path, size, "g2", durability=durability) as after:
        await after.resume("g1")

        assert {step: await after.drawn(step, 1) for step in drawn} == drawn


async def test_weights_whose_model_leaves_while_they_are_stored_are_neither_counted_nor_kept(
    head: Head, may_store: asyncio.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await train(head, 1, 2)
    monkeypatch.setattr(evicted_weights, "_WRITE_SECONDS", 0.0)
    assert await head.service.suspend_model(MODEL)

    may_store.set()
    await until(lambda: not samplers_of(head).evicted.is_writing)

    assert "s:sample:1" not in samplers_of(head).evicted
    assert files(tmp_path) == []
