"""Suspending a head saves each model completely or not at all; only the latest state resumes."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from tinkercloud_protocol.heads.checkpoint_manifest import GRADIENT, CheckpointManifest
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import StateLost, Unavailable
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_protocol.wire.paths import CheckpointPath
from tinkercloud_testing.serving.bare_heads import MODEL, SPEC, Head, a_head
from tinkercloud_testing.storage.dying_store import Death, DyingObstore
from tinkercloud_worker.checkpoints import durable
from tinkercloud_worker.checkpoints import store as store_module
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.engine.trainer import GradientLost
from tinkercloud_worker.head.durable.suspension import Suspension
from tinkercloud_worker.head.order.kept_results import ExportedResult, Results

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


async def test_a_stopping_head_rejects_requests_and_suspending_it_is_idempotent(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        assert not head.service.status().suspended
        await head.service.suspend()
        first = await head.manifest()

        await head.service.suspend()

        assert head.service.status().suspended
        assert await head.manifest() == first
        with pytest.raises(Unavailable, match="send the request again"):
            head.add(1)


async def test_a_model_with_a_lost_gradient_is_suspended_and_reports_it_once(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(_: str) -> None:
        raise GradientLost("rank 1 of 2 died")

    for generation, previous in (("g1", None), ("g2", "g1")):
        with a_head(root, tmp_path, generation) as head:
            if previous is None:
                await head.begin()
                head.add(1)
                await head.answer(1)
                monkeypatch.setattr(head.backend.trainer, "export_gradient", lose)
            else:
                await head.resume(previous)
            await head.service.suspend()

    with a_head(root, tmp_path, "g3") as after:
        await after.resume("g2")
        for seq_id, send in ((2, after.apply), (3, after.add), (4, after.apply)):
            send(seq_id)

        assert b"rank 1 of 2 died" in await after.answer(2)
        assert b'"step":1.0' in await after.answer(4)


async def test_a_partial_gradient_is_not_saved(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("not now")

    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        head.add(1)
        monkeypatch.setattr(head.backend.trainer, "discard_gradient", fail)
        head.send_broken(2)
        await head.answer(2)
        await head.service.suspend()

        assert GRADIENT not in (await head.manifest()).files


async def test_results_of_a_suspended_head_are_returned_by_the_next_one(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        await head.service.suspend()
        head.service.results.release()

        assert await head.service.retrieve(f"{MODEL}:0") is None


async def test_a_state_of_another_generation_is_never_used(root: str, tmp_path: Path) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        await before.service.suspend()
    with a_head(root, tmp_path, "g3") as after:
        with pytest.raises(StateLost, match="did not suspend it"):
            await after.resume("g2")

        assert after.service.status().models == []


async def test_a_head_suspended_before_it_was_recorded_is_resumed(
    root: str, tmp_path: Path
) -> None:
    for generation, previous in (("g1", None), ("g2", "g1")):
        with a_head(root, tmp_path, generation) as head:
            await (head.resume(previous) if previous else head.begin())
            await head.service.suspend()

    with a_head(root, tmp_path, "g3") as after:
        await after.resume("g1")

        assert after.service.status().models == [str(MODEL)]
        assert (await after.manifest()).lineage == ["g1", "g2"]


async def test_resuming_is_idempotent_and_safe_to_repeat_concurrently(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        before.add(1)
        before.apply(2)
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        await asyncio.gather(after.resume("g1"), after.resume("g1"))
        after.add(3)
        after.apply(4)
        await after.answer(4)
        await after.resume("g1")

        after.add(5)
        after.apply(6)
        assert orjson.loads(await after.answer(6))["metrics"]["step"] == 3


async def train_a_step_and_suspend(root: str, tmp_path: Path) -> None:
    """Train one step on a head of generation g1, and suspend the model."""
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        before.add(1)
        before.apply(2)
        await before.answer(2)
        await before.service.suspend()


async def assert_second_step_continues(after: Head) -> None:
    """Resume the model and continue training."""
    await after.resume("g1")
    after.add(3)
    after.apply(4)
    assert orjson.loads(await after.answer(4))["metrics"]["step"] == 2


async def test_a_resume_that_fails_at_its_end_does_not_block_the_next_attempt(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await train_a_step_and_suspend(root, tmp_path)

    def fails(_results: Results, _kept: ExportedResult, _owner: str) -> None:
        raise Death

    with a_head(root, tmp_path, "g2") as after:
        monkeypatch.setattr(Results, "restore", fails)
        with pytest.raises(Death):
            await after.resume("g1")
        monkeypatch.undo()
        with pytest.raises(KeyError):
            after.backend.trainer.export_state(str(MODEL))

        await assert_second_step_continues(after)


@pytest.mark.parametrize("loss", [StateLost("rank 1 died"), GradientLost("rank 1 died")])
async def test_a_model_lost_while_resuming_stays_in_the_store_and_can_be_resumed_again(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Exception
) -> None:
    await train_a_step_and_suspend(root, tmp_path)

    def lose(*_: object) -> None:
        raise loss

    with a_head(root, tmp_path, "g2") as after:
        monkeypatch.setattr(after.backend.trainer, "import_state", lose)
        with pytest.raises(Unavailable, match=r"rank 1 died.*send the request again"):
            await after.resume("g1")
        monkeypatch.undo()

        await assert_second_step_continues(after)


async def test_a_model_that_is_resuming_while_its_head_stops_stays_in_the_store(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as stopping:

        async def stop_meanwhile(*_: object) -> None:
            await stopping.service.suspend()

        monkeypatch.setattr(Suspension, "_restore_samplers", stop_meanwhile)
        with pytest.raises(Unavailable, match="stopping"):
            await stopping.resume("g1")

        assert stopping.service.status().models == []
        with pytest.raises(KeyError):
            stopping.backend.trainer.export_state(str(MODEL))
        assert (await stopping.manifest()).generation == "g1"


async def test_a_model_deleted_during_suspension_does_not_delay_its_head(
    root: str, tmp_path: Path
) -> None:
    release = threading.Event()
    with a_head(root, tmp_path, "g1", drain_seconds=0.1) as head:
        await head.begin()
        await head.answer(0)
        held = asyncio.create_task(head.backend.thread.run(lambda _: release.wait()))
        head.add(1)
        suspending = asyncio.create_task(head.service.suspend())
        await asyncio.sleep(0.3)
        deleting = asyncio.create_task(head.service.delete_model(MODEL))
        await asyncio.sleep(0)
        release.set()

        await asyncio.wait_for(suspending, timeout=10)
        await asyncio.gather(held, deleting)
        assert head.service.status().suspended


async def test_an_upload_cancelled_by_a_stopping_head_can_be_repeated(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = CheckpointStore.write

    async def write_slowly(*arguments: Any, **keywords: Any) -> CheckpointManifest:
        await asyncio.sleep(1)
        return await write(*arguments, **keywords)

    with a_head(root, tmp_path, "g1", drain_seconds=0.1) as before:
        await before.begin()
        monkeypatch.setattr(CheckpointStore, "write", write_slowly)
        before.send(routes.SAVE_WEIGHTS, 1, path="mine")
        await before.answer(0)
        await before.service.suspend()
        await asyncio.sleep(1.2)
    monkeypatch.undo()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")
        assert b"save again" in await after.answer(1)
        after.send(routes.SAVE_WEIGHTS, 2, path="mine")

        assert orjson.loads(await after.answer(2)) == {"path": f"tinker://{MODEL}/weights/mine"}


async def suspend_until_death(
    head: Head, monkeypatch: pytest.MonkeyPatch, writes: int
) -> BaseException | None:
    with monkeypatch.context() as patch:
        dying = DyingObstore(writes)
        patch.setattr(store_module, "obstore", dying)
        patch.setattr(durable, "obstore", dying)
        try:
            await head.service.suspend()
        except Unavailable as error:
            return error
    return None


async def test_a_head_that_dies_while_suspending_leaves_the_old_or_the_complete_new_state(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_head(root, tmp_path, "g0") as first:
        await first.begin()
        await first.service.suspend()
    seen = set()
    for writes in range(16):
        with a_head(root, tmp_path, f"g{writes + 1}") as head:
            await head.resume("g0")
            head.add(1)
            await head.answer(1)
            cut_off = await suspend_until_death(head, monkeypatch, writes)
            generation = (await head.manifest()).generation
            seen.add((generation == "g0", cut_off is None))
        with a_head(root, tmp_path, f"again-{writes}") as after:
            await after.resume(generation)
            assert after.service.status().models == [str(MODEL)]
        if cut_off is None:
            break

    assert (True, False) in seen
    assert (False, True) in seen


async def test_a_failed_suspension_can_be_repeated(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        error = await suspend_until_death(head, monkeypatch, 2)
        assert str(MODEL) in str(error)
        assert not head.service.status().suspended

        await head.service.suspend()

        assert head.service.status().suspended
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")


async def test_the_last_checkpoint_is_a_normal_one_and_saving_it_is_idempotent(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        head.add(1)
        head.apply(2)
        await head.answer(2)
        assert head.service.status().latest_checkpoint is None

        paths = [await head.service.checkpoint() for _ in range(2)]

        expected = f"tinker://{MODEL}/weights/last-step-000001"
        assert paths == [[expected], [expected]]
        assert head.service.status().latest_checkpoint == expected
        assert (await head.backend.store.manifest(CheckpointPath.parse(expected))).step == 1


async def test_the_last_checkpoint_of_one_model_leaves_the_others_alone(
    root: str, tmp_path: Path
) -> None:
    other, unknown = ModelId("s", 1), ModelId("s", 2)
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        await head.service.create_model(other, SPEC)
        await head.service.retrieve(f"{other}:0")

        paths = [await head.service.checkpoint(only=str(name)) for name in (other, unknown)]

        assert paths == [[f"tinker://{other}/weights/last-step-000000"], []]
        assert head.service.status().latest_checkpoint == paths[0][0]
