"""A head that dies at any write of its journal or snapshots is continued to the bit.

The heads are real, but run in this process, so that a death can be placed at each write.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.heads.journal_files import has_journal, manifest_path
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.training_requests import OptimStepRequest
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.envelope import TrainingEnvelope
from tinkercloud_protocol.wire.errors import InvalidRequest, Overloaded, StateLost, Unavailable
from tinkercloud_testing.serving.bare_heads import (
    MODEL,
    SPEC,
    WHOLE,
    Head,
    a_head,
    described,
    train,
    until,
)
from tinkercloud_worker.checkpoints import durable
from tinkercloud_worker.checkpoints import store as store_module
from tinkercloud_worker.head.durable.journal_room import NoRoom
from tinkercloud_worker.head.durable.snapshots import Snapshots
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.model.operations import Operations
from tinkercloud_worker.head.order import requests
from tinkercloud_worker.journal.folder import JournalFolder, Segment

pytestmark = pytest.mark.timeout(300)

CONFIG = DurabilityConfig(snapshot_steps=2, whole_model_seconds=0.001)
STEPS = 3
STRIDE = int(os.environ.get("TINKERCLOUD_TEST_STRIDE", "4"))
"""`make test-kills` tries every write, the tests of each change every fourth."""
LAST = 2 * STEPS + 2


def send(head: Head, seq_id: int) -> None:
    """Send a request of the scenario: three steps, then a sampler, then a named checkpoint."""
    if seq_id == LAST:
        head.send(routes.SAVE_WEIGHTS, seq_id, path="saved")
    elif seq_id == LAST - 1:
        head.send(routes.SAVE_WEIGHTS_FOR_SAMPLER, seq_id, sampling_session_seq_id=1)
    elif seq_id % 2:
        head.add(seq_id, first=5 + seq_id)
    else:
        head.apply(seq_id)


class Death(BaseException):
    """Stands for the end of the process, which no code can handle."""


class Mortality:
    """Ends the process that writes, as far as anybody can see, at one of its writes."""

    def __init__(self, writes_until_death: int) -> None:
        self.left = writes_until_death
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self.died = asyncio.Event()

    def next(self) -> bool:
        """Count a write; return whether the process dies in it."""
        with self._lock:
            self.left -= 1
            if self.left >= 0:
                return False
            self._loop.call_soon_threadsafe(self.died.set)
            return True

    def check(self) -> None:
        if self.next():
            raise Death

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def mortal(*arguments: object, **keywords: object) -> object:
            self.check()
            return function(*arguments, **keywords)

        return mortal

    def halfway(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def mortal(segment: Segment, content: bytes) -> None:
            if self.next():
                function(segment, content[: len(content) // 2])
                raise Death
            function(segment, content)

        return mortal

    def store(self, module: Any) -> Any:
        mortality = self

        class Store:
            def __getattr__(self, name: str) -> Any:
                function = getattr(module, name)
                if name not in {"put_async", "rename_async", "delete_async"}:
                    return function

                async def write(*arguments: object, **keywords: object) -> object:
                    mortality.check()
                    return await function(*arguments, **keywords)

                return write

        return Store()


@contextmanager
def mortal(mortality: Mortality) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_manifest", "create", "remove_before"):
            patch.setattr(JournalFolder, name, mortality.before(getattr(JournalFolder, name)))
        patch.setattr(Segment, "write", mortality.halfway(Segment.write))
        patch.setattr(durable, "write", mortality.before(durable.write))
        for module in (durable, store_module):
            patch.setattr(module, "obstore", mortality.store(module.obstore))
        yield


async def unless_dead(mortality: Mortality, work: Any) -> Any:
    """Return the result of some work; None if the process died first."""
    task, death = asyncio.ensure_future(work), asyncio.ensure_future(mortality.died.wait())
    await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
    death.cancel()
    if not mortality.died.is_set():
        return await task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


async def scenario(head: Head, mortality: Mortality, answers: dict[int, bytes], first: int) -> None:
    """Send requests two ahead of the results, until all are answered or the process dies."""
    for seq_id in range(first, LAST + 3):
        if seq_id <= LAST:
            send(head, seq_id)
            await unless_dead(mortality, head.confirmed())
            if mortality.died.is_set():
                return
        if first <= (due := seq_id - 2) <= LAST:
            answer = await unless_dead(mortality, head.answer(due))
            if mortality.died.is_set():
                return
            answers[due] = answer


@pytest.fixture(scope="module", params=[SPEC, WHOLE], ids=["an adapter", "a whole model"])
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    found: ModelSpec = request.param
    return found


Points = list[tuple[int, Any]]


def points(head: Head) -> Points:
    """Return the curve of the model, without the times of its steps."""
    ((_, curve),) = head.backend.curves.all()
    return [(point.step, point.metrics) for point in curve.points]


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec
) -> tuple[dict[int, bytes], Points]:
    """Return the answers and the curve of a head that nobody kills and that keeps no journal."""

    async def run() -> tuple[dict[int, bytes], Points]:
        answers: dict[int, bytes] = {}
        folder = tmp_path_factory.mktemp("undisturbed")
        with a_head(folder.as_uri(), folder, "g", spec=spec) as head:
            await head.begin()
            await scenario(head, Mortality(10**9), answers, 1)
            return answers, points(head)

    return asyncio.run(run())


async def test_a_death_at_any_write_loses_nothing_and_repeats_nothing(
    tmp_path: Path, expected: tuple[dict[int, bytes], Points], spec: ModelSpec
) -> None:
    for num_writes in range(0, 10**6, STRIDE):
        folder = tmp_path / str(num_writes)
        root, journals = (folder / "store").as_uri(), folder / "journals"
        mortality, answers = Mortality(num_writes), dict[int, bytes]()
        with (
            mortal(mortality),
            a_head(root, folder, "g1", journals=journals, durability=CONFIG, spec=spec) as head,
        ):
            await unless_dead(mortality, head.begin())
            is_created = not mortality.died.is_set()
            if is_created:
                await scenario(head, mortality, answers, 1)
            head.service.close()
            await asyncio.sleep(0)
        if not mortality.died.is_set():
            assert answers == expected[0]
            assert num_writes > 15, "the scenario has fewer writes than that"
            return
        if not is_created:
            continue

        with a_head(root, folder, "g2", journals=journals, durability=CONFIG, spec=spec) as head:
            await head.resume("g1")
            # The client sends what was not confirmed again, and polls for what it has no result of.
            done = max(answers, default=0)
            for seq_id in range(done + 1, LAST + 1):
                send(head, seq_id)
                await head.confirmed()
            for seq_id in range(done + 1, LAST + 1):
                answers[seq_id] = await head.answer(seq_id)
            assert (answers, points(head)) == expected, f"killed at write {num_writes}"
            assert await head.drawn(1, 1)
        assert not list(journals.glob("runs/*/suspended/*/*.part"))


async def test_a_head_of_another_generation_does_not_use_the_journal(tmp_path: Path) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        await head.answer(0)

    with (
        a_head(root, tmp_path, "g2", journals=journals) as head,
        pytest.raises(StateLost, match="left no journal"),
    ):
        await head.resume("g0")


async def test_requests_that_failed_for_another_client_are_not_repeated(tmp_path: Path) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        head.add(1, first=6)
        await head.confirmed()
        before = await head.loss(1)
        # Number 2 is missing.
        head.add(3, first=9)
        await head.confirmed()
        following = await head.service.attach_model(str(MODEL))

    with a_head(root, tmp_path, "g2", journals=journals) as head:
        await head.resume("g1")
        assert b"another client has attached" in await head.answer(3)
        head.add(following, first=6)
        head.apply(following + 1)
        assert await head.loss(following) == before
        await head.answer(following + 1)
        head.add(following + 2, first=6)
        after = await head.loss(following + 2)

    with a_head(root, tmp_path, "undisturbed") as head:
        await head.begin()
        head.add(1, first=6)
        head.apply(2)
        head.add(3, first=6)
        assert await head.loss(3) == after


async def test_a_client_that_attaches_while_a_run_is_recovered_loses_no_confirmed_step(
    tmp_path: Path,
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        head.add(1)
        head.apply(2)
        head.add(3)
        head.apply(4)
        await head.confirmed()
        await head.answer(4)
        head.add(5)
        before = await head.loss(5)

    with a_head(root, tmp_path, "g2", journals=journals) as head:
        await head.resume("g1")
        following = await head.service.attach_model(str(MODEL))
        head.add(following)
        assert await head.loss(following) == before


async def test_a_client_that_slept_while_another_attached_is_refused_by_the_next_head_too(
    tmp_path: Path,
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        head.add(1)
        await head.answer(1)
        following = await head.service.attach_model(str(MODEL))

    with a_head(root, tmp_path, "g2", journals=journals) as head:
        await head.resume("g1")
        with pytest.raises(InvalidRequest, match="another process has continued this model"):
            head.add(2)
        head.add(following)
        await head.loss(following)


async def test_a_client_that_attached_loses_no_step_if_no_snapshot_could_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(*_: object) -> None:
        raise NoRoom("the disk is full")

    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        monkeypatch.setattr(Snapshots, "write", write)
        head.add(1)
        head.apply(2)
        head.add(3, first=9)
        await head.confirmed()
        await head.answer(3)
        # Number 4 is missing.
        head.add(5, first=7)
        await head.confirmed()
        following = await head.service.attach_model(str(MODEL))
        head.add(following, first=6)
        head.apply(following + 1)
        await head.confirmed()
        await head.answer(following + 1)
        head.add(following + 2)
        before = await head.loss(following + 2)

    with a_head(root, tmp_path, "g2", journals=journals) as head:
        await head.resume("g1")
        head.add(following + 3)
        assert await head.loss(following + 3) == before
        assert b"another client has attached" in await head.answer(5)
        assert described(head).step == 2


async def test_repeated_requests_are_neither_counted_nor_charged_again(tmp_path: Path) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        head.add(1)
        head.apply(2)
        await head.confirmed()
        await head.answer(2)
        assert trained_tokens(head) > 0

    with a_head(root, tmp_path, "g2", journals=journals) as head:
        await head.resume("g1")
        await head.answer(2)
        assert trained_tokens(head) == 0
        head.add(3)
        await head.confirmed()
        await head.answer(3)
        assert trained_tokens(head) > 0


async def test_a_head_says_how_many_requests_it_has_repeated_until_all_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        await train(head, 1, 4)

    monkeypatch.setattr("tinkercloud_worker.head.durable.recovery._PROGRESS_SECONDS", 0.01)
    step, is_reached, may_end = Operations.optim_step, asyncio.Event(), asyncio.Event()

    async def halted(operations: Operations, request: OptimStepRequest) -> Any:
        is_reached.set()
        await may_end.wait()
        return await step(operations, request)

    monkeypatch.setattr(Operations, "optim_step", halted)
    with (
        capture_logs() as logged,
        a_head(root, tmp_path, "g2", journals=journals) as head,
    ):
        await head.resume("g1")
        await is_reached.wait()
        said = "repeating what the run's last session head had accepted: 1 of 4 requests done"
        repeating = described(head)
        assert (repeating.queue_state, repeating.queue_reason) == ("waiting", said)
        assert (repeating.is_repeating, repeating.step) == (True, 0)
        assert head.service.why_waiting(f"{MODEL}:4") == ("active", said)
        await until(lambda: any(each.get("progress") == said for each in logged))
        may_end.set()
        await head.answer(4)
        repeated = described(head)
        assert (repeated.queue_reason, repeated.is_repeating, repeated.step) == (None, False, 2)


def trained_tokens(head: Head) -> int:
    _, hours = head.backend.usage.changes(0)
    return sum(hour.usage.trained_tokens for hour in hours)


async def test_a_journal_that_cannot_be_read_is_not_reported_as_lost(tmp_path: Path) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        await head.answer(0)
    manifest = manifest_path(journals, str(MODEL))
    content = manifest.read_bytes()
    assert has_journal(journals, str(MODEL), "g1")
    assert not has_journal(journals, str(MODEL), "g0")

    manifest.write_bytes(content.replace(b'"format_version": 2', b'"format_version": 3'))
    assert has_journal(journals, str(MODEL), "g1")
    with (
        a_head(root, tmp_path, "g2", journals=journals) as head,
        pytest.raises(InvalidRequest, match="has version 3"),
    ):
        await head.resume("g1")

    manifest.unlink()
    manifest.mkdir()
    with pytest.raises(Unavailable, match="the disk can't be read"):
        has_journal(journals, str(MODEL), "g1")
    with (
        a_head(root, tmp_path, "g3", journals=journals) as head,
        pytest.raises(Unavailable, match="its journal can't be read"),
    ):
        await head.resume("g1")


async def test_the_key_of_a_request_that_was_rejected_is_not_that_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: object) -> None:
        raise Overloaded("too many results")

    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    step = {"model_id": str(MODEL), "adam_params": {"learning_rate": 0.1}}
    first = requests.receive_json(routes.OPTIM_STEP, orjson.dumps(step))
    step["adam_params"] = {"learning_rate": 0.2}
    second = requests.receive_json(routes.OPTIM_STEP, orjson.dumps(step))
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        with monkeypatch.context() as full:
            full.setattr(LiveModel, "_enqueue", reject)
            with pytest.raises(Overloaded):
                head.service.submit(first, "key of the first")
        head.service.submit(replace(second, place=TrainingEnvelope(str(MODEL), 1)))
        await head.confirmed()

    with a_head(root, tmp_path, "g2", journals=journals) as head:
        await head.resume("g1")
        assert head.service.submit(first, "key of the first") == f"{MODEL}:2"


async def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    root, journals = (tmp_path / "store").as_uri(), tmp_path / "journals"
    with a_head(root, tmp_path, "g1", journals=journals) as head:
        await head.begin()
        for seq_id in (1, 2):
            send(head, seq_id)
            await head.confirmed()
            await head.answer(seq_id)
    (segment,) = journals.glob(f"runs/{MODEL}/journal/*.log")
    content = bytearray(segment.read_bytes())
    content[40] ^= 1
    segment.write_bytes(content)

    with (
        a_head(root, tmp_path, "g2", journals=journals) as head,
        pytest.raises(Exception, match=f"segment 1 of the journal of training run {MODEL}: the"),
    ):
        await head.resume("g1")
