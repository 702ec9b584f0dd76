"""Memory for sampler weights is limited: the least recently used ones are evicted."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import orjson
import pytest

from tinkercloud_protocol.heads.launch import Limits, SamplerSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire import future_responses, routes
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId
from tinkercloud_testing.serving.bare_heads import MODEL, Head, a_head
from tinkercloud_testing.small_models.models import tiny_llama
from tinkercloud_testing.training.engines import an_engine
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest, SamplingResult
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.head.sampling import samplers as head_samplers
from tinkercloud_worker.head.sampling.samplers import Samplers

CHECKPOINT = SamplingSessionId("s", 9)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> WeightsCopy:
    with an_engine(tiny_llama(), tmp_path_factory.mktemp("engine")) as engine:
        engine.trainer.add_model("one", LoraConfig(rank=2, seed=1))
        return engine.trainer.copy_weights("one")


@pytest.fixture
async def head(tmp_path: Path, adapter: WeightsCopy) -> AsyncIterator[Head]:
    """A head with room for three adapters, which stores no others."""
    limits = Limits(max_snapshot_bytes=3 * adapter.size_bytes, max_stored_snapshot_bytes=0)
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1", limits=limits) as running:
        yield running


async def publish(head: Head, *sessions: int) -> None:
    """Publish snapshots of a created model; each index is also its request number."""
    for session in sessions:
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, session, sampling_session_seq_id=session)
        assert b"sampling_session_id" in await head.answer(session)


async def refused(head: Head, session: int, seq_id: int) -> dict[str, str]:
    result = await head.service.retrieve(head.sample(session, seq_id))
    assert result is not None
    assert result.content_type != future_responses.PROTOBUF
    failure: dict[str, str] = orjson.loads(result.body)
    return failure


async def test_the_least_recently_used_weights_are_evicted_and_their_users_get_instructions(
    head: Head,
) -> None:
    await head.begin()
    await publish(head, 1, 2, 3)
    drawn = await head.drawn(1, 0)

    await publish(head, 4)

    failure = await refused(head, 2, 0)
    assert failure["category"] == "user"
    assert "'s:sample:2' were evicted" in failure["error"]
    assert "save_weights_for_sampler(name)" in failure["error"]
    assert [await head.drawn(session, 1) for session in (1, 3, 4)] == [drawn] * 3
    with pytest.raises(NotFound):
        await head.backend.sampler.export("s:sample:2")


async def test_weights_in_constant_use_outlive_newer_unused_ones(
    tmp_path: Path, adapter: WeightsCopy
) -> None:
    limits = Limits(max_snapshot_bytes=2 * adapter.size_bytes, max_stored_snapshot_bytes=0)
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1", limits=limits) as head:
        await head.begin()
        await publish(head, 1)
        for step in (2, 3, 4):
            await publish(head, step)
            assert await head.drawn(step, 0) == await head.drawn(1, step)

        assert "were evicted" in (await refused(head, 3, 1))["error"]


async def test_weights_in_use_are_not_evicted(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, started, may_continue = head.backend.sampler.sample, asyncio.Event(), asyncio.Event()

    async def held_up(version: str, request: SamplingRequest) -> SamplingResult:
        started.set()
        await may_continue.wait()
        return await sample(version, request)

    await head.begin()
    await publish(head, 1)
    with monkeypatch.context() as held:
        held.setattr(head.backend.sampler, "sample", held_up)
        waiting = head.sample(1, 0)
        await started.wait()
        await publish(head, 2, 3, 4, 5)
        may_continue.set()
        drawn = await head.service.retrieve(waiting)

    assert drawn is not None
    assert drawn.content_type == future_responses.PROTOBUF, drawn.body
    assert "were evicted" in (await refused(head, 2, 0))["error"]


async def test_the_latest_weights_of_each_model_are_never_evicted(
    tmp_path: Path, adapter: WeightsCopy
) -> None:
    limits = Limits(max_snapshot_bytes=1, max_stored_snapshot_bytes=0)
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1", limits=limits) as head:
        samplers = Samplers(head.backend)
        one, other = ModelId("s", 0), ModelId("s", 1)
        sessions = [SamplingSessionId("s", index) for index in range(6)]
        await samplers.publish(sessions[0], one, adapter)
        await samplers.publish(sessions[1], one, adapter)
        await samplers.publish_inflight(sessions[2], one, adapter)
        await samplers.publish(sessions[3], other, adapter)
        assert await known(samplers, sessions) == {1, 2, 3}

        await samplers.retire_model(one)
        await samplers.publish(sessions[4], other, adapter)

        assert await known(samplers, sessions) == {4}


async def test_a_limited_number_of_evicted_sessions_is_remembered(
    head: Head, adapter: WeightsCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_samplers, "_REMEMBERED", 2)
    samplers = Samplers(head.backend)
    sessions = [SamplingSessionId("s", index) for index in range(6)]
    for session in sessions:
        await samplers.publish(session, MODEL, adapter)

    for session, words in zip(
        sessions, ("is unknown: it was deleted", "were evicted", "were evicted"), strict=False
    ):
        with pytest.raises(NotFound, match=words):
            async with samplers.sampling(session):
                pass


async def known(samplers: Samplers, sessions: list[SamplingSessionId]) -> set[int]:
    """Return the sessions that can be sampled from."""
    found = set()
    for session in sessions:
        try:
            async with samplers.sampling(session):
                found.add(session.index)
        except NotFound:
            continue
    return found


async def test_evicted_weights_of_a_checkpoint_are_loaded_again(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_there, published = head.backend.sampler.publish, list[str]()

    async def recorded(version: str, weights: WeightsCopy | None) -> None:
        published.append(version)
        await publish_there(version, weights)

    monkeypatch.setattr(head.backend.sampler, "publish", recorded)
    await head.begin()
    head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, path="x")
    path = orjson.loads(await head.answer(1))["path"]
    head.service.register_sampler(CHECKPOINT, SamplerSpec(owner="me", model_path=path))
    drawn = await head.drawn(CHECKPOINT.index, 0)
    [first] = published
    await publish(head, 2, 3, 4)
    with pytest.raises(NotFound):
        await head.backend.sampler.export(first)
    assert head.service.status().samplers == 4

    assert await head.drawn(CHECKPOINT.index, 1) == drawn
    assert len(set(published)) == 5


async def test_weights_that_failed_to_publish_use_no_memory(
    head: Head, adapter: WeightsCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(version: str, weights: WeightsCopy | None) -> None:
        raise NotFound("no such server")

    samplers = Samplers(head.backend)
    sessions = [SamplingSessionId("s", index) for index in range(6)]
    await samplers.publish(sessions[0], MODEL, adapter)
    with monkeypatch.context() as away:
        away.setattr(head.backend.sampler, "publish", refuse)
        for session in sessions[1:4]:
            with pytest.raises(NotFound, match="no such server"):
                await samplers.publish(session, MODEL, adapter)
    await samplers.publish(sessions[4], MODEL, adapter)
    await samplers.publish(sessions[5], MODEL, adapter)

    assert await known(samplers, sessions) == {0, 4, 5}


async def test_an_existing_session_is_not_replaced_by_another_request(head: Head) -> None:
    await head.begin()
    await publish(head, 1)
    drawn = await head.drawn(1, 0)
    head.add(2)
    head.apply(3)
    for seq_id, kind in enumerate(("snapshot", "inflight"), start=4):
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, seq_id, sampling_session_seq_id=1, kind=kind)

        refused = orjson.loads(await head.answer(seq_id))

        assert "was already used" in refused["error"]
        assert refused["category"] == "user"
    head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, sampling_session_seq_id=1)
    assert b"sampling_session_id" in await head.answer(1)
    assert await head.drawn(1, 1) == drawn
    assert head.service.status().samplers == 1


async def test_samples_from_evicted_weights_can_be_retrieved_from_the_next_head(
    head: Head, tmp_path: Path
) -> None:
    await head.begin()
    await publish(head, 1)
    sampled = head.sample(1, 0)
    drawn = await head.service.retrieve(sampled)
    await publish(head, 2, 3, 4)
    assert "were evicted" in (await refused(head, 1, 1))["error"]
    await head.service.suspend()
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g2") as after:
        await after.resume("g1")

        assert drawn is not None
        again = await after.service.retrieve(sampled)
        assert again is not None
        assert again.body == drawn.body


class Elsewhere:
    """A full model on the trainer's ranks, whose values are not needed."""

    name = "elsewhere"
    size_bytes = 1
    tensor_names: Sequence[str] = ()

    def __init__(self) -> None:
        self.is_removed = threading.Event()

    def fetch(self, folder: Path) -> None:
        """Fail."""
        raise NotFound(str(folder))

    def remove(self) -> None:
        """Record the call."""
        self.is_removed.set()


async def test_no_weights_remain_of_a_model_deleted_while_they_are_transferred(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    await head.begin()
    is_transferring, may_continue, there = threading.Event(), threading.Event(), Elsewhere()

    def bring() -> Elsewhere:
        is_transferring.set()
        may_continue.wait()
        return there

    monkeypatch.setattr(head.backend.trainer, "publication", lambda _: bring)
    head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, sampling_session_seq_id=1)
    await asyncio.to_thread(is_transferring.wait)
    await head.service.delete_model(MODEL)

    may_continue.set()

    assert await asyncio.to_thread(there.is_removed.wait, 60)
