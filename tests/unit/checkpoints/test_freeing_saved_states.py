"""Saving a model frees its state from memory while the store is still writing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import pytest
from torch import Tensor

from tinkercloud_protocol.heads.checkpoint_manifest import GRADIENT, CheckpointManifest
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.bare_heads import MODEL, Head, a_head
from tinkercloud_worker.engine.trainer import Gradient, TrainingState


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[Head]:
    with a_head((tmp_path / "store").as_uri(), tmp_path, "g1") as head:
        yield head


@pytest.fixture
def exported(head: Head, monkeypatch: pytest.MonkeyPatch) -> list[ReferenceType[Tensor]]:
    """Collect weak references to the tensors of all states that the trainer exports."""
    exported: list[ReferenceType[Tensor]] = []
    begin_export = head.backend.trainer.begin_export

    def export(model_id: str) -> Callable[[], TrainingState]:
        take = begin_export(model_id)

        def recorded() -> TrainingState:
            state = take()
            exported.extend(ref(tensor) for tensor in (state.moments or {}).values())
            return state

        return recorded

    monkeypatch.setattr(head.backend.trainer, "begin_export", export)
    return exported


def assert_freed(exported: list[ReferenceType[Tensor]]) -> None:
    assert exported
    # Threads drop references to finished work with a small delay.
    wait_until(
        lambda: all(tensor() is None for tensor in exported), "the state is freed", seconds=20
    )


@pytest.fixture
def slow_store(head: Head, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Delay writes of the store; return events for an arrived write and for its release."""
    write, arrived, proceed = head.backend.store.write, asyncio.Event(), asyncio.Event()

    async def write_slowly(*args: Any, **kwargs: Any) -> CheckpointManifest:
        arrived.set()
        await proceed.wait()
        return await write(*args, **kwargs)

    monkeypatch.setattr(head.backend.store, "write", write_slowly)
    return arrived, proceed


async def test_a_saved_state_is_freed_once_encoded_even_if_the_store_is_slow(
    head: Head,
    exported: list[ReferenceType[Tensor]],
    slow_store: tuple[asyncio.Event, asyncio.Event],
) -> None:
    arrived, proceed = slow_store
    await head.begin()
    head.send(routes.SAVE_WEIGHTS, 1, path="first")
    await arrived.wait()

    assert_freed(exported)
    proceed.set()
    assert f"{MODEL}/weights/first".encode() in await head.answer(1)


async def last_checkpoint(head: Head) -> str:
    (path,) = await head.service.checkpoint()
    return path


async def checkpoint_of_a_user(head: Head) -> str:
    return (await head.service.save_model(str(MODEL), None)).tinker_path


@pytest.mark.parametrize(
    ("save", "name"),
    [(last_checkpoint, "last-step-000000"), (checkpoint_of_a_user, "saved-step-000000")],
)
async def test_a_state_that_no_request_of_the_client_saves_is_freed_once_encoded(
    head: Head,
    exported: list[ReferenceType[Tensor]],
    slow_store: tuple[asyncio.Event, asyncio.Event],
    save: Callable[[Head], Coroutine[Any, Any, str]],
    name: str,
) -> None:
    arrived, proceed = slow_store
    await head.begin()
    head.add(1)
    await head.answer(1)
    saved = asyncio.create_task(save(head))
    await arrived.wait()

    assert_freed(exported)
    proceed.set()
    assert (await saved).endswith(f"{MODEL}/weights/{name}")


async def test_suspending_frees_the_state_before_exporting_the_gradient(
    head: Head, exported: list[ReferenceType[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    await head.begin()
    head.add(1)
    await head.answer(1)
    export_gradient = head.backend.trainer.export_gradient

    def export_after_the_state(model_id: str) -> Gradient | None:
        assert_freed(exported)
        return export_gradient(model_id)

    monkeypatch.setattr(head.backend.trainer, "export_gradient", export_after_the_state)
    await head.service.suspend()

    assert GRADIENT in (await head.manifest()).files
