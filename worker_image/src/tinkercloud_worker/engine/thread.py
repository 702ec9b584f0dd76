"""The one thread that computes.

Training jobs run one at a time, in the order they were given; those that wait and may share a pass
(`Batcher`) run as one, at the turn of the first. YieldPoint them, and at the points a
long job offers, the thread takes turns at a background task: the decoding steps of a sampler that
shares the trainer's weights. So neither training nor sampling can starve the other, and nothing
ever runs two passes of the base model at once.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from tinkercloud_protocol.errors import Unavailable

T = TypeVar("T")
ItemT = TypeVar("ItemT")
ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)
YieldPoint = Callable[[], None]

_TURNS = 8
"""Background steps between two jobs, or at each pause of one."""


class ThreadStopped(Unavailable):
    """A job came when the thread had been told to end; it has not been run."""


@runtime_checkable
class Batcher(Protocol[ItemT_contra, T_co]):
    """Computes several items as one job, where they may share one."""

    def can_batch(self, items: Sequence[ItemT_contra], item: ItemT_contra) -> bool:
        """Return whether an item may join others in one job."""

    def run_batch(self, items: Sequence[ItemT_contra], yield_point: YieldPoint) -> Sequence[T_co]:
        """Return a result for each item. What it raises is raised for all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Alone:
    """A group of one."""

    job: Callable[[YieldPoint], Any]

    def can_batch(self, _items: Sequence[None], _item: None) -> bool:
        return False

    def run_batch(self, _items: Sequence[None], yield_point: YieldPoint) -> Sequence[Any]:
        return [self.job(yield_point)]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """An item that waits for its turn."""

    group: Batcher[Any, Any]
    item: Any
    resolve: Callable[[Any, BaseException | None], None]


class Background(Protocol):
    """Work done in small steps whenever the thread has time. Called from the thread only."""

    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""

    def step(self) -> None:
        """Do a little. Must not raise."""


class NoBackground:
    """For engines whose sampler runs elsewhere."""

    def has_work(self) -> bool:
        """Return False."""
        return False

    def step(self) -> None:
        """Do nothing."""


class EngineThread:
    """Runs jobs for an event loop. Start it once; it ends with `stop`."""

    def __init__(
        self, on_crash: Callable[[BaseException], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        """Make a thread.

        Args:
            on_crash: called, on the thread, if the background raises after all. The thread is
                over then and waiters would wait for ever, so it should end the process.
            now: clock, in seconds.
        """
        self._on_crash = on_crash
        self._now = now
        self._heard: float | None = None
        self._background: Background = NoBackground()
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, background: Background) -> None:
        """Begin to work."""
        self._background = background
        self._thread.start()

    def stop(self) -> None:
        """Finish the job that runs, drop the others, and end the thread.

        Waiters of dropped jobs wait until they are cancelled. Jobs that come later raise
        ThreadStopped.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._thread.is_alive()

    def silent_seconds(self) -> float:
        """Return the seconds since the thread last reported, while it works; 0 if it is idle.

        It reports at each job, each pause that a job offers and each background step. From the
        outside nothing else tells a thread that hangs from one that computes.
        """
        heard = self._heard
        return 0.0 if heard is None else self._now() - heard

    def wake(self) -> None:
        """Say that the background may have work."""
        with self._wake:
            self._wake.notify()

    async def run(self, job: Callable[[YieldPoint], T]) -> T:
        """Run a job on the thread and return its result; its exception is raised here.

        The job receives a function to call whenever the background may have a turn.

        Raises:
            ThreadStopped: the thread has been told to end.
        """
        result: T = await self.run_batched(_Alone(job), None)
        return result

    async def run_lightweight(self, job: Callable[[], T]) -> T:
        """Run a job that computes next to nothing, such as saving or deleting.

        Others that share the trainer's device may go on meanwhile: it takes no memory there.
        """
        result: T = await self._queued(_Alone(lambda _: job()), None)
        return result

    async def run_batched(self, group: Batcher[ItemT, T], item: ItemT) -> T:
        """Run an item on the thread, with others of its group that wait, and return its result."""
        return await self._queued(group, item)

    async def _queued(self, group: Batcher[ItemT, T], item: ItemT) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def resolve(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type] # None only beside an error

        def resolve_there(result: T | None, error: BaseException | None) -> None:
            loop.call_soon_threadsafe(resolve, result, error)

        with self._wake:
            if self._stopping:
                raise ThreadStopped("the engine's thread has ended; send the request again")
            self._jobs.append(_Job(group, item, resolve_there))
            self._wake.notify()
        return await done

    def _next_jobs(self) -> list[_Job]:
        """Return the job whose turn it is, and those that run with it. Called with the lock."""
        if not self._jobs:
            return []
        first = self._jobs.popleft()
        jobs, waiting = [first], self._jobs
        self._jobs = deque()
        for job in waiting:
            can_batch = job.group is first.group and first.group.can_batch(
                [taken.item for taken in jobs], job.item
            )
            (jobs if can_batch else self._jobs).append(job)
        return jobs

    def _do(self, jobs: Sequence[_Job]) -> None:
        try:
            results = jobs[0].group.run_batch([job.item for job in jobs], self._take_turns)
        except BaseException as error:  # noqa: BLE001 - it is raised again, for who waits
            for job in jobs:
                job.resolve(None, error)
        else:
            for job, result in zip(jobs, results, strict=True):
                job.resolve(result, None)

    def _take_turns(self) -> None:
        self._heard = self._now()
        for _ in range(_TURNS):
            if not self._background.has_work():
                return
            self._background.step()
            self._heard = self._now()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
            self._on_crash(error)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._heard = None
                while not (self._jobs or self._stopping or self._background.has_work()):
                    self._wake.wait()
                self._heard = self._now()
                if self._stopping:
                    return
                jobs = self._next_jobs()
            if jobs:
                self._do(jobs)
            # They know their results, which can be as large as a model, until the next ones come.
            del jobs
            self._take_turns()
