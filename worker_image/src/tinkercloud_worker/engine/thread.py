"""The one thread that computes.

Training jobs run one at a time, in order of arrival. Queued jobs that can share a pass (`Batcher`)
run as one job when the first of them reaches the front of the queue. Between jobs, and at the yield
points of a long job, the thread runs steps of a background task: the decoding steps of a sampler
that shares the trainer's weights. So neither training nor sampling can starve the other, and two
passes of the base model never run at once.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tinkercloud_protocol.errors import Unavailable

T = TypeVar("T")
ItemT = TypeVar("ItemT")
ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)
YieldPoint = Callable[[], None]

"""Called by a long job wherever background steps may run."""

_STEPS_PER_YIELD = 8
"""Background steps that run between two jobs, or at each yield point of a job."""


class ThreadStopped(Unavailable):
    """The thread was stopped before this job arrived; the job has not run."""


class Batcher(Protocol[ItemT_contra, T_co]):
    """Runs several queued items as one job."""

    def can_batch(self, items: Sequence[ItemT_contra], item: ItemT_contra) -> bool:
        """Return whether an item can run in the same job as the items before it."""

    def run_batch(self, items: Sequence[ItemT_contra], yield_point: YieldPoint) -> Sequence[T_co]:
        """Run the items and return one result for each. An exception fails all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class _SingleJob:
    """Runs one job by itself."""

    job: Callable[[YieldPoint], Any]

    def can_batch(self, _items: Sequence[None], _item: None) -> bool:
        return False

    def run_batch(self, _items: Sequence[None], yield_point: YieldPoint) -> Sequence[Any]:
        return [self.job(yield_point)]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """An item in the queue."""

    batcher: Batcher[Any, Any]
    item: Any
    resolve: Callable[[Any, BaseException | None], None]


class Background(Protocol):
    """Work done in small steps whenever the thread is free. Called from the thread only."""

    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""

    def step(self) -> None:
        """Run one step. Must not raise."""


class NoBackground:
    """The background task of an engine whose sampler runs elsewhere."""

    def has_work(self) -> bool:
        """Return False."""
        return False

    def step(self) -> None:
        """Do nothing."""


class EngineThread:
    """Runs jobs for an event loop. Start it once; it runs until `stop`."""

    def __init__(
        self, on_crash: Callable[[BaseException], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        """Make a thread.

        Args:
            on_crash: called on the thread if the background task raises. The thread has ended by
                then and waiters would block forever, so this should end the process.
            now: clock, in seconds.
        """
        self._on_crash = on_crash
        self._now = now
        self._last_report: float | None = None
        self._background: Background = NoBackground()
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, background: Background) -> None:
        """Start the thread."""
        self._background = background
        self._thread.start()

    def stop(self) -> None:
        """Finish the running job, drop the queued ones, and end the thread.

        Callers of dropped jobs wait until they are cancelled. Jobs that arrive later raise
        ThreadStopped.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread.is_alive()

    def silent_seconds(self) -> float:
        """Return the seconds since the thread last reported progress; 0 if it is idle.

        It reports at each job, each yield point and each background step. From the outside, this is
        the only difference between a thread that hangs and one that computes.
        """
        reported = self._last_report
        return 0.0 if reported is None else self._now() - reported

    def wake(self) -> None:
        """Notify the thread that the background task may have work."""
        with self._wake:
            self._wake.notify()

    async def run(self, job: Callable[[YieldPoint], T]) -> T:
        """Run a job on the thread and return its result; its exception is raised here.

        The job receives a function to call wherever background steps may run.

        Raises:
            ThreadStopped: the thread was stopped.
        """
        result: T = await self.run_batched(_SingleJob(job), None)
        return result

    async def run_lightweight(self, job: Callable[[], T]) -> T:
        """Run a job with hardly any computation, such as saving or deleting.

        It needs no device memory, so other users of the trainer's device may continue meanwhile.
        """
        result: T = await self._queued(_SingleJob(lambda _: job()), None)
        return result

    async def run_batched(self, batcher: Batcher[ItemT, T], item: ItemT) -> T:
        """Run an item together with queued items of the same batcher; return its result."""
        return await self._queued(batcher, item)

    async def _queued(self, batcher: Batcher[ItemT, T], item: ItemT) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def resolve(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type] # None only with an error

        def resolve_there(result: T | None, error: BaseException | None) -> None:
            loop.call_soon_threadsafe(resolve, result, error)

        with self._wake:
            if self._stopping:
                raise ThreadStopped("the engine thread has stopped; send the request again")
            self._jobs.append(_Job(batcher, item, resolve_there))
            self._wake.notify()
        return await done

    def _next_jobs(self) -> list[_Job]:
        """Return the first queued job and those that run with it. Call it with the lock held."""
        if not self._jobs:
            return []
        first = self._jobs.popleft()
        jobs, waiting = [first], self._jobs
        self._jobs = deque()
        for job in waiting:
            is_batched = job.batcher is first.batcher and first.batcher.can_batch(
                [taken.item for taken in jobs], job.item
            )
            (jobs if is_batched else self._jobs).append(job)
        return jobs

    def _do(self, jobs: Sequence[_Job]) -> None:
        try:
            results = jobs[0].batcher.run_batch([job.item for job in jobs], self._run_background)
        except BaseException as error:  # noqa: BLE001 - each waiting caller gets it
            for job in jobs:
                job.resolve(None, error)
        else:
            for job, result in zip(jobs, results, strict=True):
                job.resolve(result, None)

    def _run_background(self) -> None:
        self._last_report = self._now()
        for _ in range(_STEPS_PER_YIELD):
            if not self._background.has_work():
                return
            self._background.step()
            self._last_report = self._now()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - callers must not wait forever, whatever it is
            self._on_crash(error)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._last_report = None
                while not (self._jobs or self._stopping or self._background.has_work()):
                    self._wake.wait()
                self._last_report = self._now()
                if self._stopping:
                    return
                jobs = self._next_jobs()
            if jobs:
                self._do(jobs)
            # Jobs reference their results, which can be as large as a model: free them now.
            del jobs
            self._run_background()
