"""A suspended model resumes in another head exactly where it was, with all waiting requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from tinkercloud_protocol.heads.launch import Limits
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable
from tinkercloud_testing.serving.bare_heads import a_head
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.inference.client import ServerUnreachable


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


async def test_training_continues_bit_for_bit(root: str, tmp_path: Path) -> None:
    with a_head(root, tmp_path, "g0") as whole:
        await whole.begin()
        for seq_id in (1, 3, 6):
            whole.add(seq_id)
        for seq_id in (2, 5):
            whole.apply(seq_id)
        whole.add(4, first=50)
        whole.apply(7)
        expected = [await whole.loss(seq_id) for seq_id in (1, 3, 4, 6)]
        await whole.answer(7)
        weights = await whole.weights()

    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        before.add(1)
        before.apply(2)
        before.add(3)
        losses = [await before.loss(1), await before.loss(3)]
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")
        after.add(4, first=50)
        after.apply(5)
        after.add(6)
        after.apply(7)
        losses += [await after.loss(4), await after.loss(6)]
        await after.answer(7)

        assert losses == expected
        assert await after.weights() == weights


async def test_steps_fail_without_loss_while_a_colocated_engine_is_unavailable(
    root: str, tmp_path: Path
) -> None:
    is_away = False

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        if is_away:
            raise ServerUnreachable("the engine is away")
        yield

    with a_head(root, tmp_path, "g0") as whole:
        await whole.begin()
        whole.add(1)
        whole.apply(2)
        whole.add(3, first=50)
        whole.apply(4)
        await whole.answer(4)
        weights = await whole.weights()

    with a_head(root, tmp_path, "g1", turn=turn) as before:
        await before.begin()
        before.add(1)
        before.apply(2)
        await before.answer(2)
        is_away = True
        before.add(3)
        failed = orjson.loads(await before.answer(3))
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")
        after.add(4, first=50)
        after.apply(5)
        await after.answer(5)

        assert failed == {"error": "the engine is away", "category": "server"}
        assert await after.weights() == weights


async def test_requests_behind_a_missing_one_are_still_waiting(root: str, tmp_path: Path) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        before.add(2, first=50)
        before.apply(3)
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")

        after.add(1)

        assert await after.loss(2) > 0
        assert b"metrics" in await after.answer(3)


async def test_a_result_can_be_retrieved_and_its_request_repeated(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        before.add(1)
        before.apply(2)
        first = await before.answer(1)
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")

        after.add(1)
        after.apply(2)

        assert await after.answer(1) == first
        assert b"metrics" in await after.answer(2)
        with pytest.raises(InvalidRequest, match="different content"):
            after.add(1, first=50)


async def test_the_rest_of_a_step_that_failed_is_dropped_in_the_next_head_too(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        before.add(1)
        before.send_broken(2)
        before.add(4)
        before.apply(5)
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")

        after.add(3)

        assert b"not run" in await after.answer(3)
        assert b"broken batch" in await after.answer(2)
        assert b"not run" in await after.answer(4)
        assert b"not applied" in await after.answer(5)
        after.add(6)
        after.apply(7)
        assert orjson.loads(await after.answer(7))["metrics"]["step"] == 1


async def test_a_waiting_rejected_request_fails_in_the_next_head(root: str, tmp_path: Path) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        before.send_broken(2)
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")

        after.add(1)

        failure = orjson.loads(await after.answer(2))
        assert failure == {"error": "broken batch", "category": "user"}


async def test_a_waiting_request_that_the_next_head_rejects_fails_at_its_position(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        before.apply_as_an_older_head_did(2, eps=0)
        before.add(3)
        before.apply(4)
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")

        after.add(1)

        failure = orjson.loads(await after.answer(2))
        assert "adam_params.eps" in failure["error"]
        assert failure["category"] == "user"
        assert await after.loss(3) > 0
        assert orjson.loads(await after.answer(4))["metrics"]["step"] == 1


async def test_accepted_requests_wait_in_a_head_with_a_smaller_queue(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        before.add(2)
        before.apply(3)
        await before.service.suspend()
    with a_head(root, tmp_path, "g2", limits=Limits(max_queued_bytes=1)) as after:
        await after.resume("g1")

        after.add(1)

        assert orjson.loads(await after.answer(3))["metrics"]["step"] == 1


async def test_a_model_that_failed_to_create_reports_it_in_the_next_head(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1", limits=Limits(max_lora_rank=1)) as before:
        await before.begin()
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")
        after.apply(1)

        assert b"must be at most 1" in await after.answer(0)
        assert b"could not be created" in await after.answer(1)


async def test_samplers_keep_their_versions_and_equal_weights_are_stored_once(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        before.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, sampling_session_seq_id=0)
        before.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 2, sampling_session_seq_id=1)
        before.add(3)
        before.send(routes.OPTIM_STEP, 4, adam_params={"learning_rate": 0.5})
        for index in (2, 3):
            before.send(
                routes.SAVE_WEIGHTS_FOR_SAMPLER,
                index + 3,
                sampling_session_seq_id=index,
                kind="inflight",
            )
        await before.answer(6)
        drawn = [await before.drawn(session, 0) for session in range(4)]
        await before.service.suspend()
        stored = (await before.manifest()).files
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")

        assert [await after.drawn(session, 1) for session in range(4)] == drawn
        assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
        assert len([name for name in stored if name.startswith("sampler-")]) == 2


async def test_weights_that_many_sessions_share_are_published_once_in_the_next_head(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        for index in range(5):
            before.send(
                routes.SAVE_WEIGHTS_FOR_SAMPLER,
                index + 1,
                sampling_session_seq_id=index,
                kind="inflight",
            )
        await before.answer(5)
        drawn = [await before.drawn(session, 0) for session in range(5)]
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        publish, published = after.backend.sampler.publish, list[str]()

        async def recorded(version: str, weights: WeightsCopy | None) -> None:
            published.append(version)
            await publish(version, weights)

        monkeypatch.setattr(after.backend.sampler, "publish", recorded)
        await after.resume("g1")

        assert len(published) == 1
        assert [await after.drawn(session, 1) for session in range(5)] == drawn


async def test_oversized_or_unreachable_samplers_do_not_affect_the_rest_of_a_model(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_head(root, tmp_path, "g1", limits=Limits(max_sampler_bytes=1)) as before:
        await before.begin()
        before.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, sampling_session_seq_id=0)
        await before.answer(1)
        asked = list[str]()

        async def lost(version: str) -> WeightsCopy:
            asked.append(version)
            raise Unavailable("no room for it")

        monkeypatch.setattr(before.backend.sampler, "export", lost)
        await before.service.suspend()
        assert asked == []
    with a_head(root, tmp_path, "g2") as between:
        await between.resume("g1")
        between.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 2, sampling_session_seq_id=1)
        await between.answer(2)
        monkeypatch.setattr(between.backend.sampler, "export", lost)
        await between.service.suspend()
        assert len(asked) == 1
    with a_head(root, tmp_path, "g3") as after:
        await after.resume("g2")

        after.add(3)
        after.apply(4)
        assert b"metrics" in await after.answer(4)


async def test_the_latest_samplers_are_restored_if_not_all_fit(root: str, tmp_path: Path) -> None:
    with a_head(root, tmp_path, "g1", limits=Limits(max_sampler_bytes=1 << 16)) as before:
        await before.begin()
        for index in range(8):
            before.add(3 * index + 1)
            before.apply(3 * index + 2)
            before.send(
                routes.SAVE_WEIGHTS_FOR_SAMPLER, 3 * index + 3, sampling_session_seq_id=index
            )
        await before.answer(24)
        latest = await before.drawn(7, 0)
        await before.service.suspend()
        files = (await before.manifest()).files
        sizes = [f.size_bytes for name, f in files.items() if name.startswith("sampler-")]
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")

        assert 0 < sum(sizes) <= 1 << 16
        assert await after.drawn(7, 1) == latest
        with pytest.raises(AssertionError, match="is unknown: it was deleted"):
            await after.drawn(0, 1)
