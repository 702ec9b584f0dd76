"""A running head suspends single models to free memory, and resumes them on demand."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import orjson
import pytest

from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.launch import HeldModel, Limits
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import NotFound, StateLost, Unavailable
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_testing.serving.bare_heads import MODEL, SPEC, Head, a_head, samplers_of
from tinkercloud_testing.serving.served_heads import a_served_head
from tinkercloud_testing.small_models.pictures import picture
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.durable.suspension import Suspension

pytestmark = pytest.mark.timeout(120)

OTHER = ModelId("t", 0)
NAME = str(MODEL)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
async def head(root: str, tmp_path: Path) -> AsyncIterator[Head]:
    """Return a head with a model that has been trained for one step."""
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        await train(head, 1)
        yield head


async def train(head: Head, step: int) -> float:
    """Train the given step, counted from 1, and return its loss."""
    await head.service.recall(NAME)
    head.add(2 * step - 1)
    head.apply(2 * step)
    loss = await head.loss(2 * step - 1)
    assert orjson.loads(await head.answer(2 * step))["metrics"]["step"] == step
    return loss


def held(head: Head, name: str = NAME) -> HeldModel:
    (found,) = [model for model in head.service.held() if model.model_id == name]
    return found


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Block before a suspended state's manifest is written; return events to control it."""
    has_arrived, may_continue = asyncio.Event(), asyncio.Event()
    commit = CheckpointStore.commit_suspended

    async def held_commit(self: CheckpointStore, manifest: SuspendedManifest) -> None:
        has_arrived.set()
        await may_continue.wait()
        await commit(self, manifest)

    monkeypatch.setattr(CheckpointStore, "commit_suspended", held_commit)
    return has_arrived, may_continue


async def test_a_suspended_model_uses_no_memory_and_training_continues_bit_for_bit(
    head: Head, root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g0") as uninterrupted:
        await uninterrupted.service.create_model(MODEL, SPEC)
        expected = [await train(uninterrupted, step) for step in range(1, 5)]
    assert held(head).memory_bytes > 0

    assert await head.service.suspend_model(MODEL)

    assert held(head) == HeldModel(model_id=NAME, is_suspended=True, step=1)
    assert head.service.status().models == []
    losses = [await train(head, 2)]
    await head.service.suspend_model(MODEL)
    losses += [await train(head, 3), await train(head, 4)]
    assert losses == expected[1:]
    assert not held(head).is_suspended


async def test_a_full_fine_tune_resumes_bit_for_bit(root: str, tmp_path: Path) -> None:
    whole = SPEC.model_copy(update={"lora": None})
    losses = []
    for generation in ("g0", "g1"):
        with a_head(root, tmp_path, generation) as head:
            await head.service.create_model(MODEL, whole)
            for each in range(1, 4):
                losses.append(await train(head, each))
                if generation == "g1":
                    assert await head.service.suspend_model(MODEL)

    assert losses[3:] == losses[:3]


async def test_other_models_train_while_one_is_suspended(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_arrived, may_continue = hold_writes(monkeypatch)
    suspending = asyncio.create_task(head.service.suspend_model(MODEL))
    await has_arrived.wait()

    await head.service.create_model(OTHER, SPEC)
    result = await head.service.retrieve(f"{OTHER}:0")

    assert result is not None
    assert b"error" not in result.body
    may_continue.set()
    assert await suspending
    assert held(head, str(OTHER)).memory_bytes > 0


async def test_a_request_that_arrives_during_suspension_waits_and_is_served(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_arrived, may_continue = hold_writes(monkeypatch)
    suspending = asyncio.create_task(head.service.suspend_model(MODEL))
    await has_arrived.wait()

    training = asyncio.create_task(train(head, 2))
    reading = asyncio.create_task(head.service.retrieve(f"{NAME}:2"))
    await asyncio.sleep(0)
    assert not training.done()
    may_continue.set()

    assert await suspending
    await training
    result = await reading
    assert result is not None
    assert orjson.loads(result.body)["metrics"]["step"] == 1


@pytest.mark.parametrize("path", ["train", "sample", "save"])
async def test_a_model_with_work_is_not_suspended(head: Head, path: str) -> None:
    head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 3, sampling_session_seq_id=1)
    await head.answer(3)
    if path == "train":
        head.add(4)
    elif path == "sample":
        head.sample(1, 1, max_tokens=200)
    else:
        head.send(routes.SAVE_WEIGHTS, 4, path="one")

    assert not await head.service.suspend_model(MODEL)

    assert not held(head).is_suspended
    assert await head.loss(4) if path == "train" else True


async def test_requests_behind_a_missing_one_keep_waiting_in_the_store(head: Head) -> None:
    head.apply(4)

    assert await head.service.suspend_model(MODEL)
    await head.service.recall(NAME)

    head.add(3)
    assert orjson.loads(await head.answer(4))["metrics"]["step"] == 2


async def test_an_unapplied_gradient_is_restored(head: Head) -> None:
    head.add(3)
    await head.answer(3)
    assert await head.service.suspend_model(MODEL)
    await head.service.recall(NAME)

    head.apply(4)

    metrics = orjson.loads(await head.answer(4))["metrics"]
    assert metrics["step"] == 2
    assert metrics["grad_norm"] > 0


async def test_retrieving_an_unread_result_resumes_its_model(head: Head) -> None:
    head.add(3)
    head.apply(4)
    await head.answer(4)
    assert await head.service.suspend_model(MODEL)
    assert head.service.results.bytes_of(NAME) == 0

    assert await head.loss(3) > 0

    assert not held(head).is_suspended


@pytest.mark.parametrize("kind", ["snapshot", "inflight"])
async def test_sampling_from_unsaved_weights_resumes_their_model(head: Head, kind: str) -> None:
    fields = {"kind": "inflight"} if kind == "inflight" else {}
    head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 3, sampling_session_seq_id=1, **fields)
    await head.answer(3)
    drawn = await head.drawn(1, 1)
    assert held(head).sampler_bytes > 0
    await head.service.suspend_model(MODEL)
    assert len(samplers_of(head)) == 0

    await head.service.recall("s:sample:1")

    assert await head.drawn(1, 2) == drawn


async def test_a_suspended_model_survives_the_death_of_its_head(root: str, tmp_path: Path) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        await train(head, 1)
        await head.service.suspend_model(MODEL)

    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")
        await train(after, 2)


async def test_a_resumed_model_is_never_replaced_by_its_old_state(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        await train(head, 1)
        await head.service.suspend_model(MODEL)
        await train(head, 2)

    with (
        a_head(root, tmp_path, "g2") as after,
        pytest.raises(StateLost, match="did not suspend it"),
    ):
        await after.resume("g1")


async def test_a_head_that_stops_leaves_its_suspended_models_where_they_are(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        await train(head, 1)
        await head.service.suspend_model(MODEL)
        before = await head.manifest()

        await head.service.suspend()

        assert head.service.status().suspended
        assert await head.manifest() == before
        with pytest.raises(Unavailable, match="stopping"):
            await head.service.recall(NAME)
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")
        await train(after, 2)


@pytest.mark.parametrize("moment", ["suspending", "coming back"])
async def test_a_head_that_stops_during_a_suspension_loses_nothing(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        await train(head, 1)
        other: asyncio.Task[object]
        if moment == "suspending":
            has_arrived, may_continue = hold_writes(monkeypatch)
            other = asyncio.create_task(head.service.suspend_model(MODEL))
        else:
            await head.service.suspend_model(MODEL)
            has_arrived, may_continue = hold_withdrawal(monkeypatch)
            other = asyncio.create_task(head.service.recall(NAME))
        await has_arrived.wait()
        stopping = asyncio.create_task(head.service.suspend())
        await asyncio.sleep(0.05)
        may_continue.set()

        await asyncio.gather(other, return_exceptions=True)
        await stopping
    monkeypatch.undo()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")
        await train(after, 2)


def hold_withdrawal(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Block a resuming model before it withdraws its suspended state."""
    has_arrived, may_continue = asyncio.Event(), asyncio.Event()
    withdraw = CheckpointStore.withdraw_suspended

    async def held_withdraw(self: CheckpointStore, manifest: SuspendedManifest) -> None:
        has_arrived.set()
        await may_continue.wait()
        await withdraw(self, manifest)

    monkeypatch.setattr(CheckpointStore, "withdraw_suspended", held_withdraw)
    return has_arrived, may_continue


@pytest.mark.parametrize("kind", ["snapshot", "inflight"])
async def test_a_suspended_model_and_its_samplers_keep_their_owner(head: Head, kind: str) -> None:
    """Else the large requests for all suspended models would share the limits of one owner."""
    fields = {"kind": "inflight"} if kind == "inflight" else {}
    head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 3, sampling_session_seq_id=1, **fields)
    await head.answer(3)
    targets = (NAME, "s:sample:1")

    assert await head.service.suspend_model(MODEL)

    assert [head.service.owner_of(each) for each in targets] == [SPEC.owner] * 2
    await head.service.recall(NAME)
    assert [head.service.owner_of(each) for each in targets] == [SPEC.owner] * 2
    assert head.service.owner_of("unknown:train:0") == ""


IMAGE = {"type": "image", "format": "png", "data": b64encode(picture(4, 4)).decode()}


async def test_a_prompt_is_not_prepared_before_its_model_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that were decoded already would be in memory for as long as they wait for it."""
    session = "s:sample:1"
    async with a_served_head(tmp_path) as head:
        await head.begin(NAME, SPEC)
        save = {"model_id": NAME, "seq_id": 1, "sampling_session_seq_id": 1}
        await head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, orjson.dumps(save), NAME)
        await head.result(f"{NAME}:1")
        await head.send(f"{routes.HEAD_SUSPEND_MODEL}/{NAME}", b"", NAME)
        wrong = {
            "sampling_session_id": session,
            "seq_id": 0,
            "prompt": {"chunks": [IMAGE]},
            "sampling_params": {"max_tokens": 1},
        }

        async def fail(*_: object) -> None:
            raise Unavailable("the store is away")

        monkeypatch.setattr(CheckpointStore, "read_file", fail)
        waits = await head.send(routes.ASAMPLE, orjson.dumps(wrong), session)
        monkeypatch.undo()
        rejected = await head.send(routes.ASAMPLE, orjson.dumps(wrong), session)

    assert (waits.status, rejected.status) == (503, 400), (waits.body, rejected.body)


Fault = Callable[[pytest.MonkeyPatch], None]


def store_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "put_suspended", fail)


def manifest_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(CheckpointStore, "commit_suspended", fail)


@pytest.mark.parametrize("fault", [store_is_full, manifest_fails])
async def test_a_model_that_cannot_be_written_stays_in_memory(
    head: Head, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    fault(monkeypatch)

    assert not await head.service.suspend_model(MODEL)

    await train(head, 2)
    monkeypatch.undo()
    assert await head.service.suspend_model(MODEL)
    await train(head, 3)


async def test_a_model_whose_samplers_cannot_all_be_kept_stays_in_memory(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1", limits=Limits(max_snapshot_bytes=1)) as head:
        await head.begin()
        await train(head, 1)
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, 3, sampling_session_seq_id=1)
        await head.answer(3)

        assert not await head.service.suspend_model(MODEL)

        await head.drawn(1, 1)


async def test_a_model_that_cannot_be_read_now_resumes_later(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    await head.service.suspend_model(MODEL)

    async def fail(*_: object) -> None:
        raise Unavailable("the store is away")

    for method in ("read_file", "withdraw_suspended"):
        monkeypatch.setattr(CheckpointStore, method, fail)
        with pytest.raises(Unavailable, match="the store is away"):
            await head.service.recall(NAME)
        monkeypatch.undo()
    await train(head, 2)


async def test_concurrent_requests_resume_a_model_once(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    await head.service.suspend_model(MODEL)
    times = 0
    resume = Suspension.resume

    async def counted(self: Suspension, *args: object) -> object:
        nonlocal times
        times += 1
        return await resume(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Suspension, "resume", counted)
    await asyncio.gather(*[head.service.recall(NAME) for _ in range(20)])

    assert times == 1
    await train(head, 2)


@pytest.mark.parametrize("moment", ["suspending", "suspended", "coming back"])
async def test_a_model_can_be_deleted_at_any_stage_of_suspension(
    head: Head, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    asking: asyncio.Task[object] | None = None
    if moment == "suspending":
        has_arrived, _ = hold_writes(monkeypatch)
        asking = asyncio.create_task(head.service.suspend_model(MODEL))
        await has_arrived.wait()
    else:
        await head.service.suspend_model(MODEL)
    if moment == "coming back":
        has_arrived, _ = hold_withdrawal(monkeypatch)
        asking = asyncio.create_task(head.service.recall(NAME))
        await has_arrived.wait()

    await head.service.delete_model(MODEL)

    if asking is not None:
        (outcome,) = await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError | NotFound | bool)
    assert head.service.held() == []
    with pytest.raises(NotFound, match="does not exist on this session head"):
        await train(head, 2)
    assert head.backend.trainer.memory_bytes(NAME) == 0


async def test_suspending_is_idempotent_and_ignores_unknown_models(head: Head) -> None:
    both = [head.service.suspend_model(MODEL), head.service.suspend_model(MODEL)]

    assert await asyncio.gather(*both) == [True, True]
    assert await head.service.suspend_model(MODEL)
    assert not await head.service.suspend_model(OTHER)


async def test_creating_a_suspended_model_again_resumes_it(head: Head) -> None:
    await head.service.suspend_model(MODEL)

    await head.begin()

    await train(head, 2)


async def test_a_failed_model_is_suspended_and_still_reports_its_failure(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1", limits=Limits(max_lora_rank=1)) as head:
        await head.begin()
        assert b"must be at most 1" in await head.answer(0)

        assert await head.service.suspend_model(MODEL)
        await head.service.recall(NAME)

        head.add(1)
        assert b"could not be created" in await head.answer(1)


async def test_the_last_checkpoint_of_a_suspended_model_is_written(tmp_path: Path) -> None:
    async with a_served_head(tmp_path) as head:
        await head.begin(NAME, SPEC)
        suspended = await head.send(f"{routes.HEAD_SUSPEND_MODEL}/{NAME}", b"", NAME)
        assert orjson.loads(suspended.body) == {"is_suspended": True}

        saved = await head.send(f"{routes.HEAD_CHECKPOINT}/{NAME}", b"", NAME)

        path = f"tinker://{NAME}/weights/last-step-000000"
        assert orjson.loads(saved.body) == {"checkpoints": [path]}
