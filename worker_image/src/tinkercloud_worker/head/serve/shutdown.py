"""Suspends all models of a head that is stopping."""

import asyncio
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.durable.durable_runs import Durability
from tinkercloud_worker.head.durable.kept_runs import KeptRuns
from tinkercloud_worker.head.durable.suspended_models import SuspendedModels
from tinkercloud_worker.head.durable.suspension import Suspension
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.model.model_lifetime import ModelEvent, ModelState
from tinkercloud_worker.head.model.model_registry import ModelRegistry
from tinkercloud_worker.head.sampling.unfinished_sample import Sample
from tinkercloud_worker.head.wire.failed_results import Moved, error_message, to_result

log = structlog.get_logger(__name__)

_MAX_CONCURRENT = 4
"""Models that are written at the same time; each is in memory twice meanwhile."""


@dataclass(slots=True)
class HeadShutdown:
    """The state of a stopping head. The service owns the models and the samples."""

    backend: Backend
    models: ModelRegistry
    samples: Mapping[str, Sample]
    suspension: Suspension
    suspended: SuspendedModels
    durability: Durability
    kept: KeptRuns
    is_suspended: bool = False
    """Whether all models are written."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def suspend(self, store: CheckpointStore) -> None:
        """Finish running requests and write all state; see `HeadService.suspend`.

        Raises:
            Unavailable: some models could not be written; the message says which and why.
        """
        self.backend.trainer.stop_waiting()
        await self.durability.forgive()
        async with self._lock:
            log.info("suspending", progress=self._progress())
            await self._drain()
            await self.suspended.settle()
            reasons = await self._suspend_all(store)
            # Models that are already being resumed have left the store: write them again.
            if resumed := self.models.tasks(ModelState.RETURNING, ModelState.AWAITED):
                await asyncio.wait(resumed)
                reasons += await self._suspend_all(store)
            missing = {str(model.model_id) for model in self._remaining()}
            # On a disk that outlives the head, the next one continues them.
            if self.backend.config.unsaved_dir is None:
                missing |= await self._suspend_kept(store, reasons)
            lost = sorted(missing)
            if lost:
                why = next((f": {reason}" for reason in reasons if reason), "")
                raise Unavailable(f"could not suspend {', '.join(lost)}{why}")
            self.is_suspended = True

    async def _suspend_all(self, store: CheckpointStore) -> list[str | None]:
        """Write all models that are not written yet; return the reasons of failures."""
        room = asyncio.Semaphore(_MAX_CONCURRENT)
        writes = [self._suspend(model, room, store) for model in self._remaining()]
        return await asyncio.gather(*writes)

    def _remaining(self) -> list[LiveModel]:
        """Return the models in memory that are not written."""
        models = self.models.in_memory.items()
        return [model for name, model in models if not self._is_written(name)]

    def _is_written(self, name: str) -> bool:
        return self.models.state(name) is ModelState.WRITTEN

    async def _suspend_kept(
        self, store: CheckpointStore, reasons: list[str | None]
    ) -> AbstractSet[str]:
        """Write the runs that are only on the disk, one at a time; return those that remain.

        Their requests run in the next head.

        Args:
            store: where to write.
            reasons: is extended by the reasons of failures.
        """
        missing, room = set[str](), asyncio.Semaphore(1)
        waiting = await self.kept.waiting()
        if waiting:
            written = [name for name in self.models.in_memory if self._is_written(name)]
            for model in [self.models.in_memory[name] for name in written]:
                await _free(model)
        for manifest in waiting:
            # A request for it may have arrived before the head started to stop.
            name = manifest.run_id
            if self.models.state(name).is_restoring and (task := self.models.task(name)):
                await asyncio.wait({task})
            failure = await self.kept.load(manifest)
            if failure is not None:
                reasons.append(failure.message)
                missing.add(name)
            elif (live := self.models.in_memory.get(name)) is not None:
                reasons.append(await self._suspend(live, room, store))
                if self._is_written(name):
                    await _free(live)
                elif name in self.models.in_memory:
                    missing.add(name)
        return missing

    async def _drain(self) -> None:
        """Give running work some time to finish, then stop returning results."""
        work = [asyncio.create_task(model.quiesce()) for model in self.models.in_memory.values()]
        work += [sample.task for sample in self.samples.values()]
        if work:
            await asyncio.wait(work, timeout=self.backend.config.timings.drain_seconds)
        self.suspension.results.freeze()

    async def _suspend(
        self, model: LiveModel, room: asyncio.Semaphore, store: CheckpointStore
    ) -> str | None:
        """Write a model; return the reason if that fails."""
        await model.queue.pause()
        with suppress(Moved):
            await model.queue.log.settled()
        # Clients will be asked to send these uploads again, so none may succeed now.
        await model.abort_background()
        if str(model.model_id) not in self.models.in_memory:
            # The model was deleted meanwhile, or another head has taken it over.
            return None
        async with room:
            sessions = self.suspension.samplers.sessions_of_model(model.model_id)
            samples = [sample.request for sample in self.samples.values()]
            unfinished = [r for r in samples if r.sampling_session_id in sessions]
            try:
                await self.suspension.write(model, unfinished, store)
            except Moved:
                self.durability.on_taken_over(str(model.model_id))
                return None
            except Exception as error:
                log.exception("a model could not be suspended", model_id=str(model.model_id))
                return error_message(to_result(error))
        await self.durability.remove(str(model.model_id))
        if self.models.in_memory.get(str(model.model_id)) is model:
            self.models.apply(str(model.model_id), ModelEvent.WRITE)
        log.info("suspended", model_id=str(model.model_id), progress=self._progress())
        return None

    def _progress(self) -> str:
        """Describe how many models are written, for those who wait for the head's end."""
        written = sum(map(self._is_written, self.models.in_memory))
        return f"{written} of {len(self.models.in_memory)} runs saved"


async def _free(model: LiveModel) -> None:
    """Free the memory of a written model, so that there is room for the next one."""
    try:
        await model.operations.delete()
    except Exception:
        log.exception("failed to free the memory of a model", model_id=str(model.model_id))
