"""A head lets another head continue a model that is in use."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_protocol.wire.ids import SamplingSessionId
from tinkercloud_testing.serving.bare_heads import MODEL, SPEC, Head, a_head
from tinkercloud_testing.serving.served_heads import a_served_head
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.durable import suspended_models
from tinkercloud_worker.head.wire.failed_results import Moved

pytestmark = pytest.mark.timeout(120)

NAME = str(MODEL)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
async def head(root: str, tmp_path: Path) -> AsyncIterator[Head]:
    """Return a head with a model that has been created."""
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        await head.answer(0)
        yield head


@pytest.fixture
async def target(root: str, tmp_path: Path) -> AsyncIterator[Head]:
    with a_head(root, tmp_path, "g2") as other:
        yield other


def send(head: Head, steps: range) -> None:
    """Send steps, counted from 1, without waiting for results."""
    for step in steps:
        head.add(2 * step - 1)
        head.apply(2 * step)


async def test_a_model_is_moved_in_the_middle_of_a_pipelined_loop_bit_for_bit(
    head: Head, target: Head, root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g0") as uninterrupted:
        await uninterrupted.begin()
        send(uninterrupted, range(1, 7))
        expected = [await uninterrupted.loss(2 * step - 1) for step in range(1, 7)]
    send(head, range(1, 5))
    first = await head.loss(1)

    await head.service.move_model(MODEL)
    await target.resume("g1")
    send(target, range(5, 7))

    assert [first, *[await target.loss(2 * step - 1) for step in range(2, 7)]] == expected
    assert head.service.held() == []


async def test_requests_for_a_moved_model_are_refused_and_change_nothing(
    head: Head, target: Head
) -> None:
    await head.service.move_model(MODEL)
    await target.resume("g1")

    for late in (
        head.service.recall(NAME),
        head.service.recall(str(SamplingSessionId.of_current_weights(MODEL))),
        head.service.retrieve(f"{NAME}:0"),
        head.service.create_model(MODEL, SPEC),
    ):
        with pytest.raises(Moved, match="another session head"):
            await late
    await head.service.move_model(MODEL)
    assert head.service.held() == []


async def test_a_poll_that_waits_for_a_result_is_answered_when_the_model_has_moved(
    head: Head, target: Head
) -> None:
    head.add(3)
    polling = asyncio.create_task(head.service.retrieve(f"{NAME}:3"))
    await asyncio.sleep(0)

    await head.service.move_model(MODEL)

    assert await polling is None
    await target.resume("g1")
    send(target, range(1, 2))
    assert await target.loss(3) > 0


async def test_a_sample_that_is_running_continues_on_the_other_head(
    head: Head, target: Head
) -> None:
    head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, sampling_session_seq_id=0)
    await head.answer(1)
    expected = await head.drawn(0, 1)
    running = head.sample(0, 2, max_tokens=200)

    await head.service.move_model(MODEL)
    await target.resume("g1")

    again = await target.service.retrieve(running)
    assert again is not None
    assert await target.drawn(0, 3) == expected


async def test_a_model_that_cannot_be_written_completely_stays_and_continues(
    head: Head, target: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "commit_suspended", refuse)
        head.add(1)
        with pytest.raises(Unavailable, match="was not moved"):
            await head.service.move_model(MODEL)
    head.apply(2)
    await head.answer(2)

    await head.service.move_model(MODEL)
    await target.resume("g1")

    assert (await target.loss(1)) > 0


async def refuse(*_: object) -> None:
    raise OSError("the store is full")


async def test_a_model_comes_back_to_a_head_that_it_left(head: Head, target: Head) -> None:
    send(head, range(1, 2))
    await head.service.move_model(MODEL)
    await target.resume("g1")
    send(target, range(2, 3))
    second = await target.loss(3)
    await target.service.move_model(MODEL)

    await head.resume("g2")

    send(head, range(3, 4))
    assert await head.loss(5) < second
    stored = await head.backend.store.find_suspended(str(MODEL))
    assert stored is not None
    assert not stored.continues_from("g1"), "after a kill, the older state would be resumed"
    assert stored.continues_from("g2")


async def test_a_model_that_is_taken_back_continues_bit_for_bit(
    head: Head, root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g0") as uninterrupted:
        await uninterrupted.begin()
        send(uninterrupted, range(1, 7))
        expected = [await uninterrupted.loss(2 * step - 1) for step in range(1, 7)]
    send(head, range(1, 5))
    first = await head.loss(1)

    await head.service.move_model(MODEL)
    for _ in range(2):
        await head.service.move_model(MODEL, is_back=True)
    await head.service.recall(NAME)
    send(head, range(5, 7))

    assert [first, *[await head.loss(2 * step - 1) for step in range(2, 7)]] == expected


async def test_the_unsaved_weights_and_running_samples_of_a_model_that_is_taken_back_remain(
    head: Head,
) -> None:
    head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 1, sampling_session_seq_id=0)
    await head.answer(1)
    expected = await head.drawn(0, 1)
    running = head.sample(0, 2, max_tokens=200)

    await head.service.move_model(MODEL)
    await head.service.move_model(MODEL, is_back=True)

    assert await head.service.retrieve(running) is not None
    assert await head.drawn(0, 3) == expected


async def test_a_model_that_is_taken_back_while_it_is_given_away_stays(
    head: Head, target: Head
) -> None:
    giving = asyncio.create_task(head.service.move_model(MODEL))
    await asyncio.sleep(0)

    await head.service.move_model(MODEL, is_back=True)

    await giving
    await head.service.recall(NAME)
    send(head, range(1, 2))
    assert await head.loss(1) > 0


async def test_a_model_that_was_taken_back_can_be_moved_again(head: Head, target: Head) -> None:
    send(head, range(1, 2))
    await head.service.move_model(MODEL)
    await head.service.move_model(MODEL, is_back=True)

    await head.service.move_model(MODEL)
    await target.resume("g1")

    send(target, range(2, 3))
    assert await target.loss(3) < await target.loss(1)


async def test_a_model_that_never_arrived_may_be_created_after_it_was_taken_back(
    head: Head, target: Head
) -> None:
    await head.service.move_model(MODEL)
    await target.service.move_model(MODEL)
    await target.service.move_model(MODEL, is_back=True)

    await target.resume("g1")

    send(target, range(1, 2))
    assert await target.loss(1) > 0


async def test_an_inactive_model_in_the_store_is_moved_without_being_loaded(
    head: Head, target: Head
) -> None:
    send(head, range(1, 2))
    await head.answer(2)
    assert await head.service.suspend_model(MODEL)

    await head.service.move_model(MODEL)
    await target.resume("g1")

    send(target, range(2, 3))
    assert await target.loss(3) < await target.loss(1)


async def test_a_model_that_was_moved_before_it_arrived_cannot_be_created_late(
    head: Head, target: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    await head.service.move_model(MODEL)
    await target.service.move_model(MODEL)

    with pytest.raises(Moved):
        await target.resume("g1")

    monkeypatch.setattr(suspended_models, "_NOT_CREATED_SECONDS", 0.0)
    await target.resume("g1")


async def test_the_api_answers_requests_for_a_moved_model_with_misdirected(
    tmp_path: Path,
) -> None:
    async with a_served_head(tmp_path) as head:
        await head.send(f"{routes.HEAD_MOVE_MODEL}/{NAME}", b"", NAME)

        step = orjson.dumps({"model_id": NAME, "seq_id": 1, "adam_params": {}})
        answer = await head.send(routes.OPTIM_STEP, step, NAME)
        await head.send(f"{routes.HEAD_MOVE_MODEL}/{NAME}", b"", NAME, method="DELETE")
        again = await head.send(routes.OPTIM_STEP, step, NAME)

    assert answer.status == routes.WRONG_GENERATION_STATUS
    assert "another session head" in answer.detail
    assert again.status != answer.status
