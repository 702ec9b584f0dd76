"""A request that ends heads is not repeated by every next head.

The process of a head "dies" while one of its requests runs: the request does not return, and its
head is left as if it were killed.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tinkercloud_protocol.requests.tensors import ForwardBackwardRequest
from tinkercloud_protocol.wire.future_responses import Result
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.serving.bare_heads import MODEL, Head, a_head
from tinkercloud_worker.custom_losses.nursery import LossEnded
from tinkercloud_worker.head.durable.run_journal import DurableRun
from tinkercloud_worker.head.model.operations import Operations
from tinkercloud_worker.head.order.attempts import Attempts, RepeatTurns
from tinkercloud_worker.journal.folder import JournalFolder

pytestmark = pytest.mark.timeout(120)

OTHER = ModelId("s", 1)


@dataclass
class Deadly:
    """Requests that don't return, and those of them that have started."""

    requests: set[tuple[str, int]] = field(default_factory=set)
    started: list[tuple[str, int]] = field(default_factory=list)
    has_started: asyncio.Event = field(default_factory=asyncio.Event)

    async def death(self) -> None:
        """Return once one of them has started."""
        await self.has_started.wait()
        self.has_started.clear()


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> Deadly:
    deadly, run = Deadly(), Operations.forward_backward

    async def run_or_die(self: Operations, request: ForwardBackwardRequest) -> Result:
        place = (request.model_id, request.seq_id)
        if place in deadly.requests:
            deadly.started.append(place)
            deadly.has_started.set()
            await asyncio.Event().wait()
        return await run(self, request)

    monkeypatch.setattr(Operations, "forward_backward", run_or_die)
    return deadly


@dataclass
class Pod:
    """Heads one after another on the same disk."""

    folder: Path
    generation: int = 0

    def head(self) -> AbstractContextManager[Head]:
        """Run the next head; the end of the context is like killing it."""
        self.generation += 1
        root = (self.folder / "store").as_uri()
        journals = self.folder / "journals"
        return a_head(root, self.folder, f"g{self.generation}", journals=journals)

    async def resume(self, head: Head) -> None:
        """Continue the run of the last head."""
        await head.resume(f"g{self.generation - 1}")


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


async def start(head: Head) -> None:
    """Make a step; then send the data of another one, with which a head dies, and its step."""
    await head.begin()
    head.add(1)
    head.apply(2)
    await head.answer(2)
    head.add(3, first=9)
    head.apply(4)
    await head.confirmed()


async def test_a_request_that_has_ended_two_heads_fails_and_the_run_continues(
    pod: Pod, deadly: Deadly
) -> None:
    deadly.requests = {(str(MODEL), 3)}
    with pod.head() as head:
        await start(head)
        await deadly.death()
    for _ in range(2):
        with pod.head() as head:
            await pod.resume(head)
            await deadly.death()

    with pod.head() as head:
        await pod.resume(head)
        assert b"ended 2 session heads" in await head.answer(3)
        assert b"weights are unchanged" in await head.answer(4)
        head.add(5)
        loss = await head.loss(5)
    with pod.head() as head:
        await pod.resume(head)
        assert b"ended 2 session heads" in await head.answer(3)

    assert len(deadly.started) == 3
    deadly.requests.clear()
    with a_head((pod.folder / "other").as_uri(), pod.folder, "undisturbed") as head:
        await head.begin()
        head.add(1)
        head.apply(2)
        head.add(3)
        assert await head.loss(3) == loss


async def test_a_head_that_stops_while_a_request_is_repeated_is_not_its_fault(
    pod: Pod, deadly: Deadly
) -> None:
    deadly.requests = {(str(MODEL), 3)}
    with pod.head() as head:
        await start(head)
        await deadly.death()
    for _ in range(3):
        with pod.head() as head:
            await pod.resume(head)
            await deadly.death()
            # It is killed in the end, since the request does not return.
            stopping = asyncio.create_task(head.service.suspend())
            assert await reached(lambda: not is_suspected(pod))
            stopping.cancel()

    deadly.requests.clear()
    with pod.head() as head:
        await pod.resume(head)
        assert await head.loss(3) > 0


def is_suspected(pod: Pod) -> bool:
    """Return whether a request is written down as one that may end its head."""
    return (pod.folder / f"journals/runs/{MODEL}/journal/deaths.json").exists()


async def test_a_request_that_only_ran_when_another_one_ended_a_head_is_not_refused(
    pod: Pod, deadly: Deadly
) -> None:
    deadly.requests = {(str(MODEL), 3), (str(OTHER), 3)}
    with pod.head() as head:
        await start(head)
        await start(replace(head, model=OTHER))
        await reached(lambda: len(deadly.started) == 2)
    with pod.head() as head:
        await pod.resume(head)
        await pod.resume(replace(head, model=OTHER))
        await reached(lambda: len(deadly.started) == 4)
        deadly.has_started.clear()
    with pod.head() as head:
        await pod.resume(head)
        await deadly.death()
        await pod.resume(replace(head, model=OTHER))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await deadly.death()
        before = list(deadly.started)

    deadly.requests.remove((str(OTHER), 3))
    with pod.head() as head:
        await pod.resume(head)
        await pod.resume(replace(head, model=OTHER))
        assert b"ended 2 session heads" in await head.answer(3)
        assert await replace(head, model=OTHER).loss(3) > 0
    assert before.count((str(MODEL), 3)) == 3
    assert before.count((str(OTHER), 3)) == 2, "it ran with another one that may end heads"


async def test_a_suspect_that_has_run_is_cleared_before_the_turn_of_another_one(
    tmp_path: Path,
) -> None:
    with ThreadPoolExecutor(1) as threads:
        folder, turns = JournalFolder(tmp_path, str(MODEL)), RepeatTurns()
        folder.create(1).close()
        attempts = Attempts(folder, threads, turns)
        attempts.deaths[3] = 1
        written = list[dict[int, int]]()

        async def next_suspect() -> None:
            async with turns.turn(alone=True):
                written.append(folder.deaths())

        async with attempts.repeating(3):
            waiting = asyncio.create_task(next_suspect())
            await asyncio.sleep(0)
            assert folder.deaths() == {3: 2}
        await waiting
        attempts.close()

    assert written == [{}]


async def test_a_loss_that_was_ended_is_computed_by_no_later_head_and_fails_with_the_same_answer(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, run = list[int](), Operations.forward_backward

    async def run_or_fail(self: Operations, request: ForwardBackwardRequest) -> Result:
        if request.seq_id == 3:
            computed.append(3)
            raise LossEnded("custom loss 'x': ended by SIGFPE")
        return await run(self, request)

    monkeypatch.setattr(Operations, "forward_backward", run_or_fail)
    # The head is killed before a snapshot has the outcome.
    monkeypatch.setattr(DurableRun, "note_change", lambda _self: None)
    with pod.head() as head:
        await start(head)
        first = await head.answer(3), await head.answer(4)
        head.add(5)
        loss = await head.loss(5)
    for _ in range(2):
        with pod.head() as head:
            await pod.resume(head)
            assert (await head.answer(3), await head.answer(4)) == first
            assert await head.loss(5) == loss

    assert b'"category":"user"' in first[0]
    assert b"SIGFPE" in first[0]
    assert computed == [3]


async def test_the_outcome_of_a_request_that_waited_in_a_snapshot_replaces_it(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, run = list[int](), Operations.forward_backward
    may_begin, may_fail = asyncio.Event(), asyncio.Event()

    async def run_or_fail(self: Operations, request: ForwardBackwardRequest) -> Result:
        if request.seq_id == 1:
            await may_begin.wait()
        if request.seq_id == 3:
            computed.append(3)
            await may_fail.wait()
            raise LossEnded("custom loss 'x': ended by SIGFPE")
        return await run(self, request)

    monkeypatch.setattr(Operations, "forward_backward", run_or_fail)
    with pod.head() as head:
        await head.begin()
        head.add(1)
        head.apply(2)
        head.add(3)
        await head.confirmed()
        journal = head.service.durability.of(str(MODEL))
        assert journal is not None
        # The snapshot is taken before request 3 runs, which waits in it.
        journal.note_change()
        may_begin.set()
        await journal.change_kept()
        monkeypatch.setattr(DurableRun, "note_change", lambda _self: None)
        may_fail.set()
        first = await head.answer(3)
    with pod.head() as head:
        await pod.resume(head)
        assert await head.answer(3) == first

    assert computed == [3]
