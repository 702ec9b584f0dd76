"""A head saves its models by itself, one at a time and while training continues."""

import asyncio
import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_protocol.heads.autosave import AutosaveConfig
from tinkercloud_protocol.heads.checkpoint_manifest import GRADIENT, CheckpointManifest
from tinkercloud_protocol.heads.launch import HeldModel
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import StateLost
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_protocol.wire.paths import CheckpointPath
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.serving.bare_heads import MODEL, SPEC, Head, a_head
from tinkercloud_worker.checkpoints import durable
from tinkercloud_worker.checkpoints.store import StoreFailed
from tinkercloud_worker.engine.trainer import TrainingState
from tinkercloud_worker.head.model import save_schedule

AT_ONCE = AutosaveConfig(steps=1)
EVERY_2_STEPS = AutosaveConfig(steps=2, seconds=0)
LATER = AutosaveConfig(steps=100, seconds=0)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
def saved(root: str, tmp_path: Path) -> Callable[[], list[str]]:
    """Return a function that returns the names of all complete training checkpoints."""
    folder = tmp_path / "store" / "runs" / str(MODEL) / "weights"
    return lambda: sorted(each.parent.name for each in folder.glob("*/manifest.json"))


def names(*steps: int) -> list[str]:
    return [f"autosave-step-{each:06d}" for each in steps]


async def train(head: Head, first: int, last: int) -> None:
    """Send the steps with these sequence numbers, two each, and wait for them."""
    for seq_id in range(first, last, 2):
        head.add(seq_id)
        head.apply(seq_id + 1)
        await head.answer(seq_id + 1)


def held(head: Head) -> HeldModel:
    (model,) = [each for each in head.service.held() if each.model_id == str(MODEL)]
    return model


def lose(*_: object) -> None:
    raise StateLost("model lost with its ranks; resume from its last checkpoint")


class HeldStore:
    """Holds the writes of a head's store until they are released."""

    def __init__(self, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
        self._write = head.backend.store.write
        self.arrived = asyncio.Event()
        self.released = asyncio.Event()
        monkeypatch.setattr(head.backend.store, "write", self.write)

    async def write(self, *args: Any, **kwargs: Any) -> CheckpointManifest:
        self.arrived.set()
        await self.released.wait()
        return await self._write(*args, **kwargs)


async def test_the_latest_two_autosaves_are_kept_without_a_gradient(
    root: str, tmp_path: Path, saved: Callable[[], list[str]]
) -> None:
    with a_head(root, tmp_path, "g1", autosave=EVERY_2_STEPS) as head:
        await head.begin()
        for round_ in range(3):
            await train(head, 1 + 4 * round_, 5 + 4 * round_)
            await reached(lambda round_=round_: names(2 * round_ + 2)[0] in saved())  # type: ignore[misc]
        await reached(lambda: saved() == names(4, 6) and not held(head).unsaved_steps)
        head.add(13)
        await head.answer(13)

        manifest = await head.backend.store.manifest(CheckpointPath.of_autosave(str(MODEL), 6))
        assert (manifest.step, manifest.owner, manifest.expires_at) == (6, SPEC.owner, None)
        assert GRADIENT not in manifest.files
        assert held(head).unsaved_steps == 0


async def test_a_slow_store_delays_no_step_and_the_next_autosave_has_the_newest_state(
    root: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: Callable[[], list[str]],
) -> None:
    with a_head(root, tmp_path, "g1", autosave=AT_ONCE) as head:
        store = HeldStore(head, monkeypatch)
        await head.begin()
        await train(head, 1, 3)
        await store.arrived.wait()
        await train(head, 3, 9)
        assert held(head).unsaved_steps == 4

        store.released.set()

        await reached(lambda: saved() == names(1, 4))


async def test_a_failing_store_is_visible_and_an_autosave_follows_its_recovery(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Callable[[], list[str]]
) -> None:
    async def fail(*_args: object, **_kwargs: object) -> None:
        raise StoreFailed("the checkpoint store is full")

    with a_head(root, tmp_path, "g1", autosave=AT_ONCE) as head:
        await head.begin()
        with monkeypatch.context() as broken:
            broken.setattr(head.backend.store, "write", fail)
            await train(head, 1, 3)
            await reached(lambda: held(head).autosave_failure is not None)
            await train(head, 3, 5)
            assert held(head).autosave_failure == "the checkpoint store is full"

        await reached(lambda: held(head).unsaved_steps == 0)
        assert held(head).autosave_failure is None
        assert saved() == names(2)


async def test_a_save_that_fails_halfway_leaves_no_files(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with a_head(root, tmp_path, "g1", autosave=AT_ONCE) as head:
        await head.begin()
        monkeypatch.setattr(durable, "put_atomically", fail)
        await train(head, 1, 3)
        await reached(lambda: held(head).autosave_failure is not None)

        assert "no space left on device" in (held(head).autosave_failure or "")
        assert not list((tmp_path / "store").rglob("autosave-*"))


async def test_while_the_store_fails_other_models_are_not_copied_in_vain(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Callable[[], list[str]]
) -> None:
    async def fail(*_args: object, **_kwargs: object) -> None:
        raise StoreFailed("the checkpoint store is full")

    with a_head(root, tmp_path, "g1", autosave=AT_ONCE) as head:
        await head.begin()
        exports: list[str] = []
        export = head.backend.trainer.begin_export

        def record(name: str) -> Callable[[], TrainingState]:
            exports.append(name)
            return export(name)

        monkeypatch.setattr(head.backend.trainer, "begin_export", record)
        with monkeypatch.context() as broken:
            broken.setattr(head.backend.store, "write", fail)
            broken.setattr(save_schedule, "_FIRST_RETRY_SECONDS", 1e9)
            broken.setattr(save_schedule, "_LONGEST_RETRY_SECONDS", 1e9)
            await train(head, 1, 3)
            await reached(lambda: held(head).autosave_failure is not None)
            other = ModelId("s", 1)
            await head.service.create_model(other, SPEC)
            await head.service.retrieve(f"{other}:0")
            head.service.models.in_memory[str(other)].operations._count_change()
            # A copy would be made between these steps.
            await train(head, 3, 7)

        assert exports == [str(MODEL)]


async def test_autosaves_that_an_interrupted_save_left_incomplete_are_deleted(
    root: str, tmp_path: Path, saved: Callable[[], list[str]]
) -> None:
    stray = tmp_path / "store" / "runs" / str(MODEL) / "weights" / "autosave-step-000099"
    stray.mkdir(parents=True)
    (stray / "optimizer.safetensors").write_bytes(b"half")

    with a_head(root, tmp_path, "g1", autosave=AT_ONCE) as head:
        await head.begin()
        await train(head, 1, 5)

        await reached(lambda: saved() == names(1, 2) or saved() == names(2))
        await reached(lambda: not stray.exists())


async def test_a_named_checkpoint_makes_an_autosave_unnecessary_unless_it_expires(
    root: str, tmp_path: Path, saved: Callable[[], list[str]]
) -> None:
    with a_head(root, tmp_path, "g1", autosave=LATER) as head:
        await head.begin()
        await train(head, 1, 3)
        head.send(routes.SAVE_WEIGHTS, 3, path="kept", ttl_seconds=3600)
        await head.answer(3)
        assert held(head).unsaved_steps == 1

        head.send(routes.SAVE_WEIGHTS, 4, path="mine")
        await head.answer(4)

        assert held(head).unsaved_steps == 0
        assert saved() == ["kept", "mine"]


async def test_loading_a_checkpoint_counts_as_a_change(root: str, tmp_path: Path) -> None:
    with a_head(root, tmp_path, "g1", autosave=LATER) as head:
        await head.begin()
        head.send(routes.SAVE_WEIGHTS, 1, path="start")
        await head.answer(1)
        assert held(head).unsaved_steps == 0

        head.send(routes.LOAD_WEIGHTS, 2, path=f"tinker://{MODEL}/weights/start", optimizer=True)
        await head.answer(2)

        assert held(head).unsaved_steps == 1


async def test_going_back_to_an_earlier_step_keeps_the_autosaves_that_are_latest_in_time(
    root: str, tmp_path: Path, saved: Callable[[], list[str]]
) -> None:
    with a_head(root, tmp_path, "g1", autosave=AT_ONCE) as head:
        await head.begin()
        head.send(routes.SAVE_WEIGHTS, 1, path="start")
        await head.answer(1)
        for first in (2, 4, 6):
            await train(head, first, first + 2)
            await reached(lambda: held(head).unsaved_steps == 0)
        head.send(routes.LOAD_WEIGHTS, 8, path=f"tinker://{MODEL}/weights/start", optimizer=True)
        await head.answer(8)

        await reached(lambda: saved() == [*names(0, 3), "start"])


async def test_a_resumed_model_keeps_its_count_and_the_autosaves_of_the_head_before(
    root: str, tmp_path: Path, saved: Callable[[], list[str]]
) -> None:
    with a_head(root, tmp_path, "g1", autosave=EVERY_2_STEPS) as before:
        await before.begin()
        await train(before, 1, 5)
        await reached(lambda: saved() == names(2) and not held(before).unsaved_steps)
        await train(before, 5, 7)
        await before.service.suspend()
    with a_head(root, tmp_path, "g2", autosave=EVERY_2_STEPS) as after:
        await after.resume("g1")
        assert held(after).unsaved_steps == 1
        await train(after, 7, 9)
        await reached(lambda: saved() == names(2, 4) and not held(after).unsaved_steps)
        await train(after, 9, 13)

        await reached(lambda: saved() == names(4, 6))


async def test_nothing_is_written_for_a_deleted_model(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Callable[[], list[str]]
) -> None:
    with a_head(root, tmp_path, "g1", autosave=AT_ONCE) as head:
        await head.begin()
        await train(head, 1, 3)
        await reached(lambda: saved() == names(1))
        store = HeldStore(head, monkeypatch)
        await train(head, 3, 5)
        await store.arrived.wait()

        await head.service.delete_model(MODEL)
        store.released.set()

        await reached(lambda: saved() == [])


async def test_the_last_checkpoint_replaces_the_autosaves(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Callable[[], list[str]]
) -> None:
    with a_head(root, tmp_path, "g1", autosave=AT_ONCE) as head:
        await head.begin()
        await train(head, 1, 3)
        await reached(lambda: saved() == names(1))
        with monkeypatch.context() as held_back:
            store = HeldStore(head, held_back)
            await train(head, 3, 5)
            await store.arrived.wait()
            last = asyncio.create_task(head.service.checkpoint())
            await asyncio.sleep(0)
        store.released.set()
        await last

        assert saved() == ["last-step-000002"]
        assert held(head).unsaved_steps == 0


async def test_a_model_that_cannot_be_saved_costs_no_other_its_last_checkpoint(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_head(root, tmp_path, "g1", autosave=LATER) as head:
        await head.begin()
        other = ModelId("s", 1)
        await head.service.create_model(other, SPEC)
        await head.service.retrieve(f"{other}:0")
        export = head.backend.trainer.begin_export

        def export_only(lost: ModelId, name: str) -> Callable[[], TrainingState]:
            if name == str(lost):
                lose()
            return export(name)

        for lost, kept in ((MODEL, other), (other, MODEL)):
            monkeypatch.setattr(head.backend.trainer, "begin_export", partial(export_only, lost))
            with pytest.raises(StateLost, match="lost with its ranks"):
                await head.service.checkpoint()
            runs = tmp_path / "store" / "runs"
            assert list((runs / str(kept)).rglob("last-step-*/manifest.json"))


async def test_an_abandoned_autosave_that_the_store_has_completed_is_deleted_too(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Callable[[], list[str]]
) -> None:
    with a_head(root, tmp_path, "g1", autosave=AT_ONCE) as head:
        await head.begin()
        write, has_written = head.backend.store.write, asyncio.Event()

        async def write_and_hang(*args: Any, **kwargs: Any) -> CheckpointManifest:
            await write(*args, **kwargs)
            has_written.set()
            await asyncio.Event().wait()
            raise AssertionError

        with monkeypatch.context() as hanging:
            hanging.setattr(head.backend.store, "write", write_and_hang)
            await train(head, 1, 3)
            await has_written.wait()
        await head.service.checkpoint()

        assert saved() == ["last-step-000001"]


async def test_a_model_that_is_lost_after_a_resume_names_the_autosave_of_the_head_before(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Callable[[], list[str]]
) -> None:
    with a_head(root, tmp_path, "g1", autosave=EVERY_2_STEPS) as before:
        await before.begin()
        await train(before, 1, 5)
        await reached(lambda: saved() == names(2) and not held(before).unsaved_steps)
        await before.service.suspend()
    with a_head(root, tmp_path, "g2", autosave=EVERY_2_STEPS) as after:
        await after.resume("g1")
        monkeypatch.setattr(after.backend.trainer, "optim_step", lose)
        after.add(5)
        after.apply(6)

        failure = await after.answer(6)

        path = CheckpointPath.of_autosave(str(MODEL), 2)
        assert f"create_training_client_from_state_with_optimizer('{path}')".encode() in failure


async def test_a_lost_model_names_its_autosave_which_outlives_it(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Callable[[], list[str]]
) -> None:
    with a_head(root, tmp_path, "g1", autosave=AT_ONCE) as head:
        await head.begin()
        await train(head, 1, 3)
        await reached(lambda: held(head).unsaved_steps == 0)
        assert head.service.status().latest_checkpoint is None
        monkeypatch.setattr(head.backend.trainer, "optim_step", lose)
        head.add(3)
        head.apply(4)
        failure = await head.answer(4)
        await head.service.delete_model(MODEL)
        await asyncio.sleep(0)

        path = CheckpointPath.of_autosave(str(MODEL), 1)
        assert f"create_training_client_from_state_with_optimizer('{path}')".encode() in failure
        assert saved() == names(1)


async def test_a_store_that_fails_to_delete_delays_the_deletion_of_old_autosaves_only(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Callable[[], list[str]]
) -> None:
    async def refuse(*_: object) -> None:
        raise StoreFailed("the checkpoint store denies access")

    with a_head(root, tmp_path, "g1", autosave=AT_ONCE) as head:
        await head.begin()
        with monkeypatch.context() as broken:
            broken.setattr(head.backend.store, "delete", refuse)
            for first in (1, 3, 5):
                await train(head, first, first + 2)
                await reached(lambda: held(head).unsaved_steps == 0)
            assert saved() == names(1, 2, 3)
        await train(head, 7, 9)

        await reached(lambda: saved() == names(3, 4))


@pytest.mark.parametrize("whole_models", [False, True])
async def test_whole_models_are_saved_only_if_that_is_configured(
    root: str, tmp_path: Path, whole_models: bool, saved: Callable[[], list[str]]
) -> None:
    config = AutosaveConfig(steps=1, whole_models=whole_models)
    with a_head(root, tmp_path, "g1", autosave=config) as head:
        await head.service.create_model(MODEL, SPEC.model_copy(update={"lora": None}))
        await train(head, 1, 3)
        if whole_models:
            await reached(lambda: saved() == names(1))
        else:
            assert held(head).unsaved_steps == 1
            await head.service.suspend()
            assert saved() == []


async def test_names_of_autosaves_are_reserved(root: str, tmp_path: Path) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        head.send(routes.SAVE_WEIGHTS, 1, path="autosave-step-000001")

        assert b"'autosave-step-000001' is reserved for automatic" in await head.answer(1)
