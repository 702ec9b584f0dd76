"""Heads take their models through the documented states."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_testing.serving.bare_heads import MODEL, Head, a_head
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.durable import suspended_models
from tinkercloud_worker.head.model.model_lifetime import ModelEvent, ModelState
from tinkercloud_worker.head.model.model_registry import ModelRegistry

pytestmark = pytest.mark.timeout(120)

NAME = str(MODEL)

Walk = list[ModelState]


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
def walk(head: Head, monkeypatch: pytest.MonkeyPatch) -> Walk:
    """Return the states of the head's model from now on, as they are entered."""
    states, apply = list[ModelState](), ModelRegistry.apply

    def recorded(self: ModelRegistry, name: str, event: ModelEvent) -> None:
        apply(self, name, event)
        if self is head.service.models:
            states.append(self.state(name))

    monkeypatch.setattr(ModelRegistry, "apply", recorded)
    return states


def state(head: Head) -> ModelState:
    return head.service.models.state(NAME)


async def test_a_suspended_model_is_freed_resumed_and_suspended_again(
    head: Head, walk: Walk
) -> None:
    assert state(head) is ModelState.LIVE

    await head.service.suspend_model(MODEL)
    await head.service.recall(NAME)
    await head.service.suspend_model(MODEL)

    suspended = [ModelState.SUSPENDING, ModelState.FREEING, ModelState.SUSPENDED]
    resumed = [ModelState.RESUMING, ModelState.RETURNING, ModelState.LIVE]
    assert walk == [*suspended, *resumed, *suspended]


async def test_a_model_that_cannot_be_written_is_live_again(
    head: Head, walk: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(CheckpointStore, "commit_suspended", refuse)

    assert not await head.service.suspend_model(MODEL)

    assert walk == [ModelState.SUSPENDING, ModelState.LIVE]


async def test_a_model_is_moved_taken_back_resumed_and_deleted(head: Head, walk: Walk) -> None:
    await head.service.move_model(MODEL)
    await head.service.move_model(MODEL, is_back=True)
    await head.service.recall(NAME)
    await head.service.delete_model(MODEL)

    moved = [ModelState.MOVING, ModelState.LEAVING, ModelState.MOVED]
    back = [ModelState.SUSPENDED, ModelState.RESUMING, ModelState.RETURNING, ModelState.LIVE]
    assert walk == [*moved, *back, ModelState.DELETING, ModelState.ABSENT]


async def test_a_moved_model_comes_back_after_another_head_has_trained_it(
    head: Head, walk: Walk, root: str, tmp_path: Path
) -> None:
    await head.service.move_model(MODEL)
    with a_head(root, tmp_path, "g2") as other:
        await other.resume("g1")
        other.add(1)
        loss = await other.loss(1)
        await other.service.move_model(MODEL)

        await head.resume("g2")

    assert loss > 0
    assert walk[-3:] == [ModelState.ABSENT, ModelState.RECOVERING, ModelState.LIVE]
    assert state(head) is ModelState.LIVE


async def test_a_head_that_stops_has_written_its_models(head: Head, walk: Walk) -> None:
    await head.service.suspend()

    assert walk == [ModelState.WRITTEN]


async def test_a_model_that_is_deleted_while_it_is_written_is_forgotten(
    head: Head, walk: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = asyncio.Event()

    async def hang(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(CheckpointStore, "commit_suspended", hang)
    suspending = asyncio.create_task(head.service.suspend_model(MODEL))
    await reached.wait()

    await asyncio.gather(head.service.delete_model(MODEL), head.service.delete_model(MODEL))

    with pytest.raises(asyncio.CancelledError):
        await suspending
    assert walk == [ModelState.SUSPENDING, ModelState.DELETING, ModelState.ABSENT]
    assert head.service.held() == []


async def test_a_model_that_is_created_while_its_namesake_is_deleted_is_another_one(
    head: Head, walk: Walk
) -> None:
    deleting = asyncio.create_task(head.service.delete_model(MODEL))
    await asyncio.sleep(0)
    assert state(head) is ModelState.DELETING

    await head.begin()

    await deleting
    assert b"model_id" in await head.answer(0)
    expected = [ModelState.DELETING, ModelState.ABSENT, ModelState.NEW, ModelState.LIVE]
    assert walk == expected


async def test_only_the_models_that_were_moved_last_are_remembered(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModelId.parse("s:train:1")
    monkeypatch.setattr(suspended_models, "_REMEMBERED", 1)
    await head.service.move_model(other)
    assert head.service.models.state(str(other)) is ModelState.REFUSED

    await head.service.move_model(MODEL)

    assert head.service.models.state(str(other)) is ModelState.ABSENT
    assert state(head) is ModelState.MOVED
