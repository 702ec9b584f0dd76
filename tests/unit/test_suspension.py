"""A suspended model goes on in another head exactly where it was, or nothing of it exists."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import obstore
import orjson
import pytest
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_protocol import futures, routes
from tinkercloud_protocol.checkpoints import SuspendedManifest
from tinkercloud_protocol.errors import InvalidRequest, StateLost, Unavailable
from tinkercloud_protocol.ids import ModelId
from tinkercloud_protocol.launch import BaseModelSource, HeadConfig, Limits, ModelSpec, Timings
from tinkercloud_protocol.paths import CheckpointPath
from tinkercloud_protocol.sampling import SampleRequest
from tinkercloud_protocol.training import LoraConfig
from tinkercloud_protocol.wire import parse_json
from tinkercloud_testing.engines import an_engine
from tinkercloud_testing.models import tiny_llama
from tinkercloud_worker.checkpoints import store as store_module
from tinkercloud_worker.checkpoints.store import CheckpointStore, open_store
from tinkercloud_worker.engine.thread import NoBackground
from tinkercloud_worker.head import requests
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.service import HeadService
from tinkercloud_worker.inference.client import ServerUnreachable
from tinkercloud_worker.inference.colocation import ColocatedThread, Turn

MODEL = ModelId("s", 0)
SPEC = ModelSpec(owner="me", lora=LoraConfig(rank=2, seed=1))
ADAM = {"learning_rate": 0.01}


@dataclass
class Head:
    """A head without its HTTP surface."""

    service: HeadService
    store: CheckpointStore

    async def begin(self) -> None:
        await self.service.create_model(MODEL, SPEC)

    async def resume(self, generation: str) -> None:
        spec = SPEC.model_copy(update={"resume_generation": generation})
        await self.service.create_model(MODEL, spec)

    def add(self, seq_id: int, first: int = 5) -> None:
        """Send data of a step."""
        message = pb.ForwardBackwardRequest(
            model_id=str(MODEL), seq_id=seq_id, loss_fn="cross_entropy"
        )
        datum = message.data.add()
        tokens = np.array([first, 6, 7], dtype="<i4").tobytes()
        datum.model_input.add().encoded_text.tokens = tokens
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense = np.array([6, 7, 8], dtype="<i8").tobytes()
        targets.dtype = pb.DTYPE_INT64
        self._send(routes.FORWARD_BACKWARD, message.SerializeToString())

    def apply(self, seq_id: int) -> None:
        self.send(routes.OPTIM_STEP, seq_id, adam_params=ADAM)

    def send(self, path: str, seq_id: int, **fields: object) -> None:
        self._send(path, orjson.dumps({"model_id": str(MODEL), "seq_id": seq_id, **fields}))

    def _send(self, path: str, body: bytes) -> None:
        self.service.submit(path, requests.read(path, body), body)

    def send_broken(self, seq_id: int) -> None:
        error = InvalidRequest("broken batch")
        self.service.refuse(str(MODEL), seq_id, routes.FORWARD_BACKWARD, b"broken", error)

    async def answer(self, seq_id: int) -> bytes:
        result = await self.service.retrieve(f"{MODEL}:{seq_id}")
        assert result is not None
        return result.body

    async def loss(self, seq_id: int) -> float:
        output = pb.ForwardBackwardOutput.FromString(await self.answer(seq_id))
        return output.metrics["loss:sum"]

    async def drawn(self, session: int, seq_id: int) -> list[int]:
        """Sample a little; return the tokens."""
        params = {"max_tokens": 12, "seed": 1, "stop": []}
        body = {
            "sampling_session_id": f"s:sample:{session}",
            "seq_id": seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": params,
        }
        request_id = self.service.sample(parse_json(SampleRequest, orjson.dumps(body)))
        result = await self.service.retrieve(str(request_id))
        assert result is not None
        assert result.content_type == futures.PROTOBUF, result.body
        (sequence,) = pb.SampleResponse.FromString(result.body).sequences
        return np.frombuffer(sequence.tokens, dtype="<i4").tolist()

    async def manifest(self) -> SuspendedManifest:
        manifest = await self.store.find_suspended(str(MODEL))
        assert manifest is not None
        return manifest

    async def weights(self) -> dict[str, bytes]:
        """Return the files of a checkpoint of everything as it is."""
        (path,) = await self.service.checkpoint()
        _, files = await self.store.read(CheckpointPath.parse(path))
        return files


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@contextmanager
def a_head(
    root: str,
    scratch: Path,
    generation: str,
    limits: Limits | None = None,
    turn: Turn | None = None,
) -> Iterator[Head]:
    """Run a head in this process; when the context ends it is gone, as if it had been killed."""
    config = HeadConfig(
        head="h",
        generation=generation,
        model=BaseModelSource(name="tiny", path=""),
        token_file="",
        checkpoint_root=root,
        scratch_dir=str(scratch),
        limits=limits or Limits(),
        timings=Timings(long_poll_seconds=20, drain_seconds=5),
    )
    store = CheckpointStore(open_store(root))
    with an_engine(tiny_llama(), scratch / generation) as engine:
        thread = engine.thread
        if turn is not None:
            thread = ColocatedThread(turn, lambda: None, lambda error: pytest.fail(repr(error)))
            thread.start(NoBackground())
        backend = Backend(config, engine.trainer, engine.sampler, thread, store, frozenset())
        service = HeadService(backend)
        yield Head(service, store)
        service.close()
        thread.stop()


async def test_training_goes_on_bit_for_bit(root: str, tmp_path: Path) -> None:
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


async def test_while_an_engine_on_the_trainers_gpus_is_away_steps_fail_and_nothing_is_lost(
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


async def test_a_result_can_be_asked_for_and_its_request_repeated(
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
        with pytest.raises(InvalidRequest, match="other content"):
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


async def test_a_refused_request_that_waits_fails_in_the_next_head(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        before.send_broken(2)
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")

        after.add(1)

        failure = orjson.loads(await after.answer(2))
        assert failure == {"error": "broken batch", "category": "user"}


async def test_a_model_that_could_not_be_created_says_so_in_the_next_head(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1", Limits(max_lora_rank=1)) as before:
        await before.begin()
        await before.service.suspend()
    with a_head(root, tmp_path, "g2") as after:
        await after.resume("g1")
        after.apply(1)

        assert b"over the limit" in await after.answer(0)
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


async def test_of_more_samplers_than_there_is_room_for_the_latest_come_back(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1", Limits(max_sampler_bytes=1 << 16)) as before:
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
        with pytest.raises(AssertionError, match="unknown to this head"):
            await after.drawn(0, 1)


async def test_a_stopping_head_refuses_requests_and_may_be_asked_again(
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


async def test_what_a_suspended_head_is_asked_for_is_given_out_by_the_next_one(
    root: str, tmp_path: Path
) -> None:
    with a_head(root, tmp_path, "g1") as head:
        await head.begin()
        await head.service.suspend()
        head.service.release_waiters()

        assert await head.service.retrieve(f"{MODEL}:0") is None


async def test_a_state_of_another_generation_is_never_used(root: str, tmp_path: Path) -> None:
    with a_head(root, tmp_path, "g1") as before:
        await before.begin()
        await before.service.suspend()
    with a_head(root, tmp_path, "g3") as after:
        with pytest.raises(StateLost, match="not suspended by the head it was in"):
            await after.resume("g2")

        assert after.service.status().models == []


async def test_a_head_that_is_suspended_before_anybody_knew_of_it_is_gone_on_from(
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


async def test_resuming_twice_at_once_and_again_is_resuming_once(root: str, tmp_path: Path) -> None:
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


class Death(Exception):
    """Stands for the end of the process."""


class DyingObstore:
    """The obstore module, until a number of writes have been made."""

    def __init__(self, writes_until_death: int) -> None:
        self.left = writes_until_death

    def __getattr__(self, name: str):
        function = getattr(obstore, name)
        if name not in {"put_async", "delete_async"}:
            return function

        async def write(*arguments: object, **keywords: object) -> object:
            if self.left == 0:
                raise Death
            self.left -= 1
            return await function(*arguments, **keywords)

        return write


async def suspend_until_death(
    head: Head, monkeypatch: pytest.MonkeyPatch, writes: int
) -> BaseException | None:
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "obstore", DyingObstore(writes))
        try:
            await head.service.suspend()
        except Unavailable as error:
            return error
    return None


async def test_a_head_that_dies_while_it_suspends_leaves_the_state_before_or_the_whole_new_one(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_head(root, tmp_path, "g0") as first:
        await first.begin()
        await first.service.suspend()
    seen = set()
    for writes in range(12):
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


async def test_a_suspension_that_failed_can_be_asked_for_again(
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


async def test_a_last_checkpoint_is_an_ordinary_one_and_may_be_asked_for_again(
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
        assert (await head.store.manifest(CheckpointPath.parse(expected))).step == 1
