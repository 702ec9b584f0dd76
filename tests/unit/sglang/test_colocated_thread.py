"""A trainer that shares its GPUs: jobs own the GPUs, and release memory afterwards."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from tinkercloud_worker.engine.batch import ModelLimits
from tinkercloud_worker.engine.turns.engine_thread import NoBackground, PieceLimit
from tinkercloud_worker.inference.colocation import ColocatedThread
from tinkercloud_worker.training.no_trainer import NoTrainer


class Record:
    """The order of events on time-shared GPUs."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.holders = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        self.holders += 1
        try:
            yield
        finally:
            self.holders -= 1
            if not self.holders:
                self.events.append("the turn ends")

    def release(self) -> None:
        self.events.append("memory is released")

    def can_batch(self, _items: Sequence[str], _item: str) -> bool:
        return True

    def run_batch(self, items: Sequence[str], _between: Callable[[], None]) -> Sequence[str]:
        assert self.holders, "the GPUs are somebody else's"
        if "bad" in items:
            raise ValueError("bad")
        self.events.extend(items)
        return items

    def pieces(self, item: str, _limit: PieceLimit) -> Generator[int, None, str]:
        yield from ()
        return self.run_batch([item], lambda: None)[0]


class Held:
    """A job that runs until it may end."""

    def __init__(self, ending: Callable[[], None]) -> None:
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        self._ending = ending
        self._loop = asyncio.get_running_loop()

    def __call__(self, *_between: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self.began.set)
        asyncio.run_coroutine_threadsafe(self.may_end.wait(), self._loop).result(10)
        self._ending()


def tasks_of(thread: ColocatedThread) -> set[asyncio.Task[Any]]:
    """Return the jobs that wait for the thread, or run."""
    return thread._tasks


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
async def thread(record: Record) -> AsyncIterator[ColocatedThread]:
    thread = ColocatedThread(
        record.turn, record.release, on_crash=lambda error: pytest.fail(repr(error))
    )
    thread.start(NoBackground())
    yield thread
    thread.stop()


async def test_batched_passes_own_the_gpus_like_other_jobs(
    thread: ColocatedThread, record: Record
) -> None:
    await thread.run_batched(record, "a pass")
    await thread.run(lambda _: record.events.append("a step"))

    released = ["memory is released", "the turn ends"]
    assert record.events == ["a pass", *released, "a step", *released]


async def test_the_last_concurrent_job_releases_memory_once(
    thread: ColocatedThread, record: Record
) -> None:
    await asyncio.gather(*[thread.run_batched(record, name) for name in ("one", "two")])

    assert sorted(record.events[:2]) == ["one", "two"]
    assert record.events[2:] == ["memory is released", "the turn ends"]


async def test_a_failing_job_releases_memory(thread: ColocatedThread, record: Record) -> None:
    with pytest.raises(ValueError, match="bad"):
        await thread.run_batched(record, "bad")

    assert record.events == ["memory is released", "the turn ends"]


async def test_a_cancelled_job_owns_the_gpus_until_it_has_ended(
    thread: ColocatedThread, record: Record
) -> None:
    job = Held(lambda: record.events.append("a step"))

    cancelled = asyncio.create_task(thread.run(job))
    await job.began.wait()
    cancelled.cancel()
    await asyncio.sleep(0)
    assert record.events == []
    job.may_end.set()
    await asyncio.gather(cancelled, return_exceptions=True)

    await until(lambda: record.events == ["a step", "memory is released", "the turn ends"])


async def test_a_job_cancelled_while_another_releases_memory_owns_the_gpus_until_it_ends(
    thread: ColocatedThread, record: Record
) -> None:
    first = Held(lambda: None)

    def second(_between: Callable[[], None]) -> None:
        assert record.holders, "the GPUs are somebody else's"
        record.events.append("the second ends")

    running = asyncio.create_task(thread.run(first))
    await first.began.wait()
    cancelled = asyncio.create_task(thread.run(second))
    await until(lambda: record.holders == 2)
    first.may_end.set()
    cancelled.cancel()
    await running

    await until(lambda: record.events[-1:] == ["the turn ends"])
    assert record.events[0] == "the second ends"


async def test_a_job_cancelled_before_it_owns_the_gpus_never_runs() -> None:
    ran, waits = [], asyncio.Event()

    @asynccontextmanager
    async def never() -> AsyncIterator[None]:
        waits.set()
        await asyncio.Event().wait()
        yield

    thread = ColocatedThread(never, lambda: None, on_crash=lambda error: pytest.fail(repr(error)))
    thread.start(NoBackground())
    cancelled = asyncio.create_task(thread.run(lambda _: ran.append("a step")))
    await waits.wait()
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await until(lambda: not tasks_of(thread))

    assert await thread.run_lightweight(lambda: "what needs no memory has no turn to wait for")
    assert ran == []
    thread.stop()


async def test_lightweight_jobs_release_memory(thread: ColocatedThread, record: Record) -> None:
    await thread.run_lightweight(lambda: record.events.append("a model is saved"))

    def fail() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await thread.run_lightweight(fail)

    assert record.events == ["a model is saved", "memory is released", "memory is released"]


async def test_saving_does_not_release_memory_of_a_running_job(
    thread: ColocatedThread, record: Record
) -> None:
    job = Held(lambda: record.events.append("a step"))

    step = asyncio.create_task(thread.run(job))
    await job.began.wait()
    saving = asyncio.create_task(
        thread.run_lightweight(lambda: record.events.append("a model is saved"))
    )
    await asyncio.sleep(0)
    next_step = asyncio.create_task(thread.run(lambda _: record.events.append("another step")))
    await until(lambda: record.holders == 2)
    job.may_end.set()
    await asyncio.gather(step, saving, next_step)

    assert record.events == [
        *("a step", "a model is saved", "another step", "memory is released", "the turn ends")
    ]


async def test_cancelled_saving_releases_memory(thread: ColocatedThread, record: Record) -> None:
    save = Held(lambda: record.events.append("a model is saved"))

    cancelled = asyncio.create_task(thread.run_lightweight(save))
    await save.began.wait()
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    save.may_end.set()

    await until(lambda: record.events == ["a model is saved", "memory is released"])


@pytest.mark.parametrize("kind", ["with a turn", "lightweight"])
async def test_waiting_jobs_end_on_cancellation_after_the_thread_has_stopped(
    thread: ColocatedThread, kind: str
) -> None:
    run = thread.run if kind == "with a turn" else thread.run_lightweight
    job = Held(lambda: None)
    waiting = [asyncio.create_task(run(job))]
    await job.began.wait()
    waiting += [asyncio.create_task(run(lambda *_: pytest.fail("it is dropped"))) for _ in "12"]
    await asyncio.sleep(0)

    stopping = asyncio.create_task(asyncio.to_thread(thread.stop))
    await until(lambda: thread._stopping)
    job.may_end.set()
    await stopping
    # As asyncio does with remaining tasks when a process ends.
    started = [*waiting, *tasks_of(thread)]
    for task in started:
        task.cancel()

    _, left = await asyncio.wait(started, timeout=10)
    assert not left


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what happens on a thread
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("uses_cuda", "emptied"), [(True, 1), (False, 0)])
def test_a_trainer_on_a_gpu_empties_the_cache_of_torch(
    uses_cuda: bool, emptied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_cuda)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))

    NoTrainer(ModelLimits(vocab_size=8, max_context_length=8)).release_memory()

    assert len(calls) == emptied
