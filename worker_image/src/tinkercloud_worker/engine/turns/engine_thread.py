"""The one thread that computes.

Jobs that compute for a model wait for their turn, which is fair between owners (`fair_queue`).
Queued jobs that can share a pass (`Batcher`) run as one job when it is the turn of the first of
them. After such a pass the thread waits a moment for jobs of the same models that are known to come
next (`followers`), so that they share the next pass too. A long job runs in pieces, and takes a
turn for each: jobs of other models run between two of them. While other owners use the engine,
pieces are small (`neighbours`), and the optimizer step that is sent right behind a batch runs
before them. Jobs without a share, such as saving and deleting, are short and run first, each in
turn with one that computes.

Between jobs, and at the yield points of a job that has no pieces, the thread runs steps of a
background task: the decoding steps of a sampler that shares the trainer's weights. So neither
training nor sampling can starve the other, and two passes of the base model never run at once.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_worker.engine.turns import rank_times, turn_waits
from tinkercloud_worker.engine.turns.fair_queue import Ahead, FairQueue, Share
from tinkercloud_worker.engine.turns.followers import Followers
from tinkercloud_worker.engine.turns.neighbours import Neighbours
from tinkercloud_worker.engine.turns.rank_times import RankTimes
from tinkercloud_worker.engine.turns.usage_counts import Payer, UsageMeter

log = logging.getLogger(__name__)

T = TypeVar("T")
ItemT = TypeVar("ItemT")
ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)
Tokens: TypeAlias = Mapping[Payer, int]
"""Tokens that were computed for each."""
YieldPoint = Callable[[], None]
"""Called by a long job wherever background steps may run."""


@dataclass(frozen=True, slots=True, eq=False)
class Pause:
    """What a job yields that can't continue before something has happened elsewhere."""

    until: "Future[Any]"
    tokens: int = 0
    """Tokens that were computed in vain."""


Pieces: TypeAlias = Generator[int | Pause, None, T]
"""A job in pieces: it yields the tokens of each piece but the last, and returns its result.

Instead of tokens it may yield a pause, after which it continues.
"""
PieceLimit: TypeAlias = Callable[[], int | None]
"""Returns the most tokens that the next piece of a job should have; None: as many as if alone."""


def run_through(pieces: "Pieces[T]", yield_point: YieldPoint) -> T:
    """Run all pieces of a job, with a yield point after each; return its result."""
    while True:
        try:
            done = next(pieces)
        except StopIteration as stop:
            yield_point()
            result: T = stop.value
            return result
        if isinstance(done, Pause):
            wait([done.until])
        yield_point()


_FOLLOWING_SECONDS = 0.004
"""How long the thread waits for the request that follows a finished one."""
_FOLLOWED_SECONDS = 0.02
"""How long it waits after a shared pass for requests that are at the head and follow those of the
pass. They are on their way from the event loop, which takes a few milliseconds."""
_STEPS_PER_YIELD = 8
"""Background steps that run between two jobs, or at each yield point of a job."""


class ThreadStopped(Unavailable):
    """The thread was stopped before this job arrived; the job has not run."""


class Batcher(Protocol[ItemT_contra, T_co]):
    """Runs several queued items as one job."""

    def can_batch(self, items: Sequence[ItemT_contra], item: ItemT_contra) -> bool:
        """Return whether an item can run in the same job as the items before it."""

    def run_batch(self, items: Sequence[ItemT_contra], yield_point: YieldPoint) -> Sequence[T_co]:
        """Run several items as one job, and return one result for each.

        An exception means that nothing has changed: each item is then run by itself, so that only
        those fail that fail alone.
        """

    def pieces(self, item: ItemT_contra, limit: PieceLimit) -> Generator[int | Pause, None, T_co]:
        """Run one item by itself. Items of other models may run between two pieces.

        Args:
            item: the item.
            limit: called before each piece. A batcher whose items run in company as they do alone
                ignores it.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Unshared(Generic[ItemT, T]):
    """Runs each item of a batcher by itself, so that its result does not depend on the others."""

    batcher: Batcher[ItemT, T]

    def can_batch(self, _items: Sequence[ItemT], _item: ItemT) -> bool:
        """Return False."""
        return False

    def run_batch(self, items: Sequence[ItemT], yield_point: YieldPoint) -> Sequence[T]:
        """Run the items; see `Batcher.run_batch`. Only ever called with one."""
        return self.batcher.run_batch(items, yield_point)

    def pieces(self, item: ItemT, _limit: PieceLimit) -> Pieces[T]:
        """See `Batcher.pieces`: always the pieces of an item that is alone."""
        return self.batcher.pieces(item, lambda: None)


@dataclass(frozen=True, slots=True, eq=False)
class _SingleJob:
    """Runs one job by itself, in one piece."""

    job: Callable[[], Any]

    def can_batch(self, _items: Sequence[None], _item: None) -> bool:
        return False

    def run_batch(self, items: Sequence[None], _yield_point: YieldPoint) -> Sequence[Any]:
        return [self.job() for _ in items]

    def pieces(self, _item: None, _limit: PieceLimit) -> Pieces[Any]:
        yield from ()
        return self.job()


@dataclass(slots=True, eq=False)
class _Job:
    """An item in the queue."""

    batcher: Batcher[Any, Any]
    item: Any
    resolve: Callable[[Any, BaseException | None], None]
    is_cancelled: Callable[[], bool]
    share: Share | None
    queued_at: float
    """When it was put in the queue last."""
    rank_times: RankTimes | None = None
    """Where its request collects when ranks ran its commands; None if it does not."""
    waited: float = 0.0
    """Seconds that it has been in the queue."""
    left: int = 0
    """Tokens of its share that are not computed."""
    pieces: Pieces[Any] | None = None
    """What is left of it, once it has started."""
    runs_alone: bool = False
    """Whether a pass that it shared has failed."""
    is_paused: bool = False
    """Whether it waits for something outside the queue (`Pause`)."""

    @property
    def can_join(self) -> bool:
        """Whether it may still share a pass."""
        return self.pieces is None and not self.runs_alone


class Background(Protocol):
    """Work done in small steps whenever the thread is free. Called from the thread only."""

    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""

    def step(self) -> Tokens:
        """Run one step; return what it computed. Must not raise."""


class NoBackground:
    """The background task of an engine whose sampler runs elsewhere."""

    def has_work(self) -> bool:
        """Return False."""
        return False

    def step(self) -> Tokens:
        """Do nothing."""
        return {}


class EngineThread:
    """Runs jobs for an event loop. Start it once; it runs until `stop`."""

    def __init__(
        self,
        on_crash: Callable[[BaseException], None],
        now: Callable[[], float] = time.monotonic,
        weights: dict[str, int] | None = None,
        usage: UsageMeter | None = None,
    ) -> None:
        """Make a thread.

        Args:
            on_crash: called on the thread if the background task raises. The thread has ended by
                then and waiters would block forever, so this should end the process.
            now: clock, in seconds.
            weights: the shares of owners, at least 1, which may change; an owner that is missing
                has 1.
            usage: counts the seconds of jobs that have a share, and of background steps; None to
                count nothing.
        """
        self._usage = usage or UsageMeter()
        self._background_seconds = 0.0
        self._on_crash = on_crash
        self._now = now
        self._last_report: float | None = None
        self._background: Background = NoBackground()
        self._short: deque[_Job] = deque()
        """Jobs without a share, in order of arrival."""
        self.weights = weights if weights is not None else {}
        """Shares of owners; changes take effect at the next turn."""
        self._queue = FairQueue[_Job](self.weights)
        self._neighbours = Neighbours(now)
        self._running: Sequence[_Job] = ()
        self._followers = Followers(now)
        self._was_short = False
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

    def why_waiting(self, owner: str, model: str) -> str | None:
        """Return how much runs before the job of a model; None if it does not wait here."""
        with self._wake:
            ahead = self._queue.ahead_of(owner, model)
            if ahead is None:
                return None
            running = [job for job in self._running if job.share is not None]
            ahead = Ahead(
                ahead.items + len(running), ahead.tokens + sum(job.left for job in running)
            )
        return (
            f"waiting for its turn to compute; requests before it: {ahead.items}"
            f" ({ahead.tokens} tokens)"
        )

    async def run(self, job: Callable[[YieldPoint], T], share: Share | None = None) -> T:
        """Run a job on the thread and return its result; its exception is raised here.

        The job receives a function to call wherever background steps may run. A job without a share
        is short: it does not wait for its turn.

        Raises:
            ThreadStopped: the thread was stopped.
        """
        single = _SingleJob(lambda: job(self._run_background))
        result: T = await self.run_batched(single, None, share)
        return result

    async def run_lightweight(self, job: Callable[[], T]) -> T:
        """Run a job with hardly any computation, such as saving or deleting.

        It needs no device memory, so other users of the trainer's device may continue meanwhile.
        """
        result: T = await self._queued(_SingleJob(job), None, None)
        return result

    async def run_batched(
        self, batcher: Batcher[ItemT, T], item: ItemT, share: Share | None = None
    ) -> T:
        """Run an item, perhaps together with queued items of the same batcher; return its result.

        Items of one model run in the order in which they arrive. An item without a share is short,
        and runs by itself.
        """
        return await self._queued(batcher, item, share)

    async def _queued(self, batcher: Batcher[ItemT, T], item: ItemT, share: Share | None) -> T:
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

        times = rank_times.collected()
        job = _Job(batcher, item, resolve_there, done.cancelled, share, self._now(), times)
        with self._wake:
            if self._stopping:
                raise ThreadStopped("the engine thread has stopped; send the request again")
            if share is None:
                self._short.append(job)
            else:
                job.left = share.tokens
                self._neighbours.note(share.owner, share.tokens)
                self._neighbours.note_sent(share.owner, _FOLLOWING_SECONDS)
                self._followers.note_sent(share.owner, share.model)
                self._queue.put(share, job)
            self._wake.notify()
        try:
            return await done
        finally:
            turn_waits.note(job.waited)

    def _await_following(self, jobs: Sequence[_Job]) -> None:
        """Give owners a moment to send the request after a finished one, if it would run first.

        A client sends an optimizer step right behind its batch, but requests of one model arrive
        here one by one. Without this pause a job of somebody else would begin in between. And
        models that have shared a pass send their next requests one after another: without the
        second pause, the first of these would run alone. That one ends when an owner who took no
        part in the pass has a job, which waits for nobody.
        """
        shares = [job.share for job in jobs if job.share is not None]
        with self._wake:
            owners = {share.owner for share in shares if self._queue.is_before_others(share.owner)}
            for share in shares:
                if not share.continues and not self._queue.is_waiting(share.owner):
                    self._neighbours.note_end(share.owner)
                    if self._neighbours.is_prompt(share.owner):
                        owners.add(share.owner)
            self._wait_until(lambda: all(map(self._queue.is_waiting, owners)), _FOLLOWING_SECONDS)
            followers = self._followers
            self._wait_until(
                lambda: followers.have_come or self._queue.has_others(followers.owners),
                followers.seconds_left(),
            )

    def _wait_until(self, have_come: Callable[[], bool], seconds: float) -> None:
        """Wait until jobs have come, or others run first. Call it with the lock held."""
        self._wake.wait_for(
            lambda: have_come() or self._short or self._stopping or self._background.has_work(),
            seconds,
        )

    def _has_jobs(self) -> bool:
        return bool(self._short or self._queue)

    def _next_jobs(self) -> list[_Job]:
        """Take the job whose turn it is and those that run with it. Call it with the lock held."""
        if self._short and not (self._was_short and self._queue):
            self._was_short = True
            return [self._short.popleft()]
        self._was_short = False
        if not self._queue:
            return []
        self._followers.stop()
        share, first = self._queue.next()
        jobs = [first]

        def joins(_share: Share, job: _Job) -> bool:
            is_batched = (
                job.can_join
                and job.batcher is first.batcher
                and first.batcher.can_batch([taken.item for taken in jobs], job.item)
            )
            if is_batched:
                jobs.append(job)
            return is_batched

        if first.can_join:
            self._queue.take_joining(share, joins)
        return jobs

    def _count_waits(self, jobs: Sequence[_Job]) -> None:
        """Count how long jobs were in the queue, and those that start to compute for a model."""
        for job in jobs:
            waited = self._now() - job.queued_at
            job.waited += waited
            if job.share is not None:
                # One that continues has been counted, and one that repeats a shared pass too.
                started = int(job.can_join)
                self._usage.on_wait(job.share.owner, waited, started)

    def _do_timed(self, jobs: Sequence[_Job]) -> None:
        """Run jobs, and count the time that they took without the background steps in it."""
        began, in_background = self._now(), self._background_seconds
        with rank_times.serving(job.rank_times for job in jobs):
            self._do(jobs)
        seconds = self._now() - began - (self._background_seconds - in_background)
        tokens = Counter[Payer]()
        for share in [job.share for job in jobs if job.share is not None]:
            tokens[Payer.of_model(share.owner, share.model)] += max(share.tokens, 1)
        self._usage.count_seconds(tokens, seconds)

    def _do(self, jobs: Sequence[_Job]) -> None:
        if len(jobs) == 1:
            self._advance(jobs[0])
            return
        try:
            results = jobs[0].batcher.run_batch([job.item for job in jobs], self._run_background)
        except Exception:
            log.exception("a shared pass failed; each of its requests runs by itself")
            for job in jobs:
                job.runs_alone = True
                self._put_back(job)
        except BaseException as error:  # noqa: BLE001 - each waiting caller gets it
            for job in jobs:
                job.resolve(None, error)
        else:
            self._end_shared(jobs, results)

    def _end_shared(self, jobs: Sequence[_Job], results: Sequence[Any]) -> None:
        """Resolve jobs. Find out what follows before that: later it may be under way already."""
        shares = [job.share for job in jobs if job.share is not None]
        followed = [share for share in shares if share.is_followed()]
        with self._wake:
            self._followers.note_pass(shares, followed, _FOLLOWED_SECONDS)
        for job, result in zip(jobs, results, strict=True):
            job.resolve(result, None)

    def _advance(self, job: _Job) -> None:
        """Run the next piece of a job."""
        if job.pieces is not None and job.is_cancelled():
            # Its model was deleted: nobody needs the rest.
            job.pieces.close()
            return
        try:
            if job.pieces is None:
                job.pieces = job.batcher.pieces(job.item, lambda: self._piece_limit(job))
            done = next(job.pieces)
        except StopIteration as stop:
            self._charge(job, job.left)
            job.resolve(stop.value, None)
        except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
            self._charge(job, job.left)
            job.resolve(None, error)
        else:
            if isinstance(done, Pause):
                self._charge(job, done.tokens)
                job.is_paused = True
                done.until.add_done_callback(lambda _: self._put_back(job))
                return
            self._charge(job, done)
            job.left -= done
            self._put_back(job)

    def _piece_limit(self, job: _Job) -> int | None:
        if job.share is None:
            return None
        with self._wake:
            return self._neighbours.most_tokens(job.share.owner)

    def _charge(self, job: _Job, tokens: int) -> None:
        if job.share is not None:
            with self._wake:
                self._neighbours.note(job.share.owner, job.share.tokens)
                self._queue.charge(job.share, tokens)

    def _put_back(self, job: _Job) -> None:
        with self._wake:
            job.is_paused, job.queued_at = False, self._now()
            if job.share is None:
                self._short.appendleft(job)
            else:
                self._queue.put_back(job.share, job)
            self._wake.notify()

    def _run_background(self) -> None:
        self._last_report = self._now()
        for _ in range(_STEPS_PER_YIELD):
            if not self._background.has_work():
                return
            began = self._now()
            # Between the passes of a batch too, its commands are those of other requests.
            with rank_times.serving(()):
                tokens = self._background.step()
            self._last_report = self._now()
            self._background_seconds += self._last_report - began
            self._usage.count_seconds(tokens, self._last_report - began)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - callers must not wait forever, whatever it is
            self._on_crash(error)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._last_report = None
                self._running = ()
                while not (self._has_jobs() or self._stopping or self._background.has_work()):
                    self._wake.wait()
                self._last_report = self._now()
                if self._stopping:
                    return
                jobs = self._running = self._next_jobs()
            if jobs:
                self._count_waits(jobs)
                self._do_timed(jobs)
                # A paused job has not ended: nothing follows it yet.
                self._await_following([job for job in jobs if not job.is_paused])
            # Jobs reference their results, which can be as large as a model: free them now.
            self._running = ()
            del jobs
            self._run_background()
