"""Startup and shutdown of a head.

The head serves health checks at once, loads its engine in the background, and then becomes ready.

On a stop signal it finishes running requests and suspends its models, so that other heads can
continue them. It retries while the checkpoint store fails. Models that are not written shortly
before the deadline go to a local folder, if there is one that outlives the head; otherwise they are
lost.

The head also stops when no API server has held its lease for `Timings.orphan_grace_seconds`: a head
on a laptop must not outlive its server indefinitely, but a restarted server should find it
unchanged. The time spent loading does not count, since nobody can hold the lease then.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import structlog

from tinkercloud_protocol.heads.launch import HeldModels, Timings
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.heads.owner_limits import OwnerLimits
from tinkercloud_protocol.wire.errors import NotFound, Unavailable
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.serve import assembly
from tinkercloud_worker.head.serve.idle_memory import IdleMemory
from tinkercloud_worker.head.serve.lease_reports import lease_reports
from tinkercloud_worker.head.serve.service import HeadService

log = structlog.get_logger(__name__)

_HUNG_SECONDS = 3600.0
"""An engine that has not reported for this long counts as hung; for ranks, the time they may take
to start is added. The engine reports at every decoding step and micro-batch, so only a single
sequence can take long: about 2**15 tokens of a model of 10**9 parameters on two cores. Ending a
healthy head costs a run its current step; ending a hung one late costs an hour."""


_RETRY_SECONDS = 0.5
_MAX_RETRY_SECONDS = 5.0
"""First and longest pause between attempts to write models to the checkpoint store."""
_LOCAL_SHARE = 0.25
"""Share of the time for suspending that is reserved for the local folder."""


class Lifecycle:
    """Owns the head's service. Belongs to one event loop."""

    def __init__(
        self,
        timings: Timings,
        build: Callable[[], Backend],
        has_journals: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a lifecycle.

        Args:
            timings: grace periods.
            build: loads the engine and all else; takes seconds, so it runs in a thread.
            has_journals: whether runs are lost with the local disk if this head does not write them
                to the checkpoint store. Blocks.
        """
        self._timings = timings
        self._has_journals = has_journals
        self._build = build
        self._head: assembly.Head | None = None
        self._ready = asyncio.Event()
        self._leases = 0
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._loading: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self.has_failed = False
        """Whether the engine could not be loaded, so that the process ends itself."""
        self.drained = asyncio.Event()
        """Set when all models are suspended or lost; long waits end then."""

    @property
    def service(self) -> HeadService:
        """The service.

        Raises:
            Unavailable: the engine is still loading.
        """
        return self._loaded().service

    @property
    def backend(self) -> Backend:
        """The parts of the head.

        Raises:
            Unavailable: the engine is still loading.
        """
        return self._loaded().backend

    def _loaded(self) -> assembly.Head:
        if self._head is None:
            raise Unavailable("the session head is loading its model; send the request again")
        return self._head

    def start(self) -> None:
        """Start loading."""
        self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            backend = await asyncio.to_thread(self._build)
            self._head = assembly.Head(
                HeadService(backend),
                backend,
                IdleMemory(backend),
                accept_requests=self._ready.set,
                expect_leases=self.expect_leases,
            )
            for step in assembly.STARTUP:
                await step.run(self._head)
        except Exception:
            log.exception("failed to load the engine")
            self.has_failed = True
            _stop_process()
            return
        log.info("ready", model=backend.config.model.name, progress="the model is loaded")

    def check_alive(self) -> None:
        """Check that this process can still work.

        Raises:
            Unavailable: it can't, and should be ended.
        """
        if self._head is None:
            return
        thread, trainer = self.backend.thread, self.backend.config.trainer
        if not thread.is_alive:
            raise Unavailable("the engine thread has stopped; send the request again")
        silent = thread.silent_seconds()
        starting = trainer.start_timeout_seconds if trainer.ranks else 0.0
        if silent > _HUNG_SECONDS + starting:
            raise Unavailable(f"the engine hangs: it has reported no progress for {silent:.0f} s")

    def set_owner_limits(self, limits: OwnerLimits) -> None:
        """Apply the current limits of an owner; ignored while the engine is loading."""
        if self._head is not None:
            self._head.backend.set_owner_limits(limits)

    def check_ready(self) -> None:
        """Check that requests are accepted.

        Raises:
            Unavailable: they are not accepted; the message says why.
        """
        status = self.service.status()
        if status.suspended:
            raise Unavailable("this session head is suspended")
        if not status.ready:
            raise Unavailable("this session head is stopping")

    async def wait_until_ready(self) -> None:
        """Return once the engine is loaded.

        Raises:
            Unavailable: the head is stopping.
        """
        ready = asyncio.create_task(self._ready.wait())
        drained = asyncio.create_task(self.drained.wait())
        await asyncio.wait({ready, drained}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        drained.cancel()
        if not self._ready.is_set():
            raise Unavailable("this session head is stopping")

    def held_models(self) -> HeldModels:
        """Return the models of the head, and the memory that is free for more, if it is bounded.

        Raises:
            Unavailable: the engine is still loading.
        """
        capacity = self.backend.trainer.capacity
        free_bytes = capacity.free_bytes if capacity is not None else None
        return HeldModels(models=self.service.held(), free_bytes=free_bytes)

    async def needed_engines(self, engines: int) -> int:
        """Return how many engines are needed if `engines` exist; see `EngineScaler.needed`.

        Raises:
            NotFound: the number of engines is fixed.
            Unavailable: the head is stopping, or not ready.
        """
        scaler = self.backend.engine_scaler
        if scaler is None:
            raise NotFound("this session head has a fixed number of engines")
        needed = asyncio.create_task(scaler.needed(engines))
        drained = asyncio.create_task(self.drained.wait())
        try:
            await asyncio.wait({needed, drained}, return_when=asyncio.FIRST_COMPLETED)
            if needed.done():
                return needed.result()
        finally:
            needed.cancel()
            drained.cancel()
        raise Unavailable("this session head is stopping")

    @contextmanager
    def held_lease(self) -> Iterator[None]:
        """Count a lease that an API server holds until the context ends."""
        self._leases += 1
        self.expect_leases()
        try:
            yield
        finally:
            self._leases -= 1
            self.expect_leases()

    async def lease_reports(self) -> AsyncIterator[bytes]:
        """Yield the reports of the head as they change, and the last one when it stops."""
        with suppress(Unavailable):
            await self.wait_until_ready()
        if self._head is not None:
            durability = self._head.service.durability
            async for line in lease_reports(self._head.backend, durability, self.drained):
                yield line

    def expect_leases(self) -> None:
        """Stop the head after a while if no API server holds its lease by then."""
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
            self._orphan_timer = None
        grace = self._timings.orphan_grace_seconds
        if self._ready.is_set() and self._leases == 0 and grace is not None:
            loop = asyncio.get_running_loop()
            self._orphan_timer = loop.call_later(grace, self._orphaned)

    def _orphaned(self) -> None:
        log.warning("no API server holds a lease; stopping")
        _stop_process()

    def begin_stop(self) -> None:
        """Reject new requests and suspend the models, as far as time allows."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        end = asyncio.get_running_loop().time() + self._timings.stop_seconds
        try:
            await self._finish_loading(end)
            if self._head is not None:
                await self._suspend_in_time(self.service, self.backend.config.unsaved_dir, end)
        except TimeoutError:
            log.critical("out of time: stopping, and models that are not suspended are lost")
        except Unavailable as error:
            log.critical(
                "stopping: models that could not be suspended are lost", reason=error.message
            )
        finally:
            # The process must end after any failure.
            if self._head is not None:
                self._head.service.results.release()
            self.drained.set()

    async def _finish_loading(self, end: float) -> None:
        """Wait for the engine until a moment of the loop's clock, if it is needed to save runs."""
        if self._loading is None or self._loading.done():
            return
        if await asyncio.to_thread(self._has_journals):
            log.info("loading before the stop, since the local disk has runs of an earlier head")
            await asyncio.wait({self._loading}, timeout=end - asyncio.get_running_loop().time())

    async def _suspend_in_time(
        self, service: HeadService, unsaved_dir: str | None, end: float
    ) -> None:
        """Suspend all models; fall back to a local folder if the checkpoint store fails.

        Args:
            service: the models.
            unsaved_dir: the local folder, if there is one.
            end: when time is out, on the loop's clock.

        Raises:
            TimeoutError: time ran out.
            Unavailable: some models could not be written anywhere.
        """
        reserved = 0.0 if unsaved_dir is None else self._timings.suspend_seconds * _LOCAL_SHARE
        try:
            async with asyncio.timeout_at(end - reserved):
                await self._suspend_until_saved(service)
                return
        except TimeoutError:
            if unsaved_dir is None:
                raise
        log.error("the checkpoint store failed; writing to a local folder", folder=unsaved_dir)
        async with asyncio.timeout_at(end):
            await service.suspend(CheckpointStore(open_store(Path(unsaved_dir).as_uri())))

    async def _suspend_until_saved(self, service: HeadService) -> None:
        for attempt in count():
            try:
                await service.suspend()
            except Unavailable as error:
                log.warning("suspending models failed; retrying", reason=error.message)
                await asyncio.sleep(min(_RETRY_SECONDS * 2**attempt, _MAX_RETRY_SECONDS))
            else:
                return

    async def stop(self) -> None:
        """Suspend the models, unless that has started already, and end."""
        self.begin_stop()
        await self.drained.wait()
        if self._loading is not None:
            self._loading.cancel()
        if self._head is not None:
            for step in assembly.SHUTDOWN:
                await step.run(self._head)


def _stop_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
