"""Brings models back into memory; concurrent callers share one attempt."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.sampling_requests import SampleRequest
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_worker.head.durable.recovery import Recovery, Resumed
from tinkercloud_worker.head.durable.suspended_models import SuspendedModels
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.model.model_lifetime import ModelEvent, ModelState
from tinkercloud_worker.head.model.model_registry import ModelRegistry, SuspendedModel
from tinkercloud_worker.head.serve.models.model_deletion import Spawn


@dataclass(frozen=True, slots=True)
class ModelRestoration:
    """Restores models of one head."""

    models: ModelRegistry
    recovery: Recovery
    suspended: SuspendedModels
    add: Callable[[LiveModel, list[SampleRequest]], None]
    """Adds a restored model, with the sampling requests to restart."""
    check_accepting: Callable[[], None]
    """Raises `Unavailable` if the head is stopping."""
    spawn: Spawn

    async def in_memory(self, model_id: ModelId, spec: ModelSpec) -> LiveModel | None:
        """Return a model, once it is in memory if the head has its state; None if it is absent."""
        name = str(model_id)
        while True:
            await self.recall(name)
            state = self.models.state(name)
            if state.is_being_deleted and (task := self.models.task(name)):
                await asyncio.wait({task})
                self.check_accepting()
            elif state.is_restoring or (
                state is ModelState.ABSENT and spec.resume_generation is not None
            ):
                await self._recover(model_id, spec)
            else:
                return self.models.in_memory.get(name)

    async def recall(self, target: str) -> None:
        """Resume the model that a request is for, if this head has suspended it.

        The model stays in memory at least until the caller awaits something else.

        Args:
            target: the model, or a sampling session of its weights.

        Raises:
            Unavailable: it is not resumed yet, or can't be resumed now.
            InvalidRequest: its suspended state is damaged.
        """
        while (name := self.suspended.waiting_for(target)) is not None:
            self.check_accepting()
            await self.suspended.recall(name, self._resume)

    async def _resume(self, suspended: SuspendedModel) -> None:
        """Resume a model that this head has suspended.

        Raises:
            NotFound: it was deleted meanwhile.
            Unavailable: it can't be resumed now.
            InvalidRequest: its state is damaged.
        """
        model_id = ModelId.parse(suspended.manifest.run_id)

        def accept() -> None:
            self.check_accepting()
            self.models.apply(str(model_id), ModelEvent.ACCEPT)

        task = self._start(
            model_id,
            ModelEvent.REQUEST,
            lambda: self.recovery.resume(model_id, suspended.spec, suspended.manifest, accept),
        )
        await _restored(model_id, task)

    async def _recover(self, model_id: ModelId, spec: ModelSpec) -> None:
        """Continue a model of the head that the specification names.

        Raises:
            StateLost: that head left no state and no journal.
            Unavailable: it can't be continued now.
        """
        # A head that started to stop meanwhile would not suspend the model: leave it in the store.
        task = self._start(
            model_id,
            ModelEvent.RECOVER,
            lambda: self.recovery.read(model_id, spec, self.check_accepting),
        )
        await asyncio.shield(task)

    async def recover_kept(self, manifest: JournalManifest) -> None:
        """Continue a run from the local journal, even if the head is stopping. See `_recover`.

        Raises:
            NotFound: it was deleted meanwhile.
        """
        model_id = ModelId.parse(manifest.run_id)
        spec = manifest.spec.model_copy(update={"resume_generation": manifest.generations[-1]})
        # A head that stops writes it at once.
        task = self._start(
            model_id,
            ModelEvent.KEEP,
            lambda: self.recovery.read(model_id, spec, lambda: None),
        )
        await _restored(model_id, task)

    def _start(
        self, model_id: ModelId, event: ModelEvent, restore: Callable[[], Awaitable[Resumed]]
    ) -> asyncio.Task[None]:
        """Return the task that restores a model."""
        name = str(model_id)
        is_shared = self.models.state(name).is_restoring
        self.models.apply(name, event)
        if is_shared and (task := self.models.task(name)) is not None:
            return task

        async def work() -> None:
            try:
                model, unfinished = await restore()
            except BaseException:
                self.models.apply(name, ModelEvent.NOT_RESTORED)
                raise
            self.add(model, unfinished)

        task = self.spawn(work())
        self.models.start(name, task)
        return task


async def _restored(model_id: ModelId, task: asyncio.Task[None]) -> None:
    """Return once a task has restored a model; cancelling the caller does not end the task.

    Raises:
        NotFound: the model was deleted meanwhile.
    """
    await asyncio.wait({task})
    if task.cancelled():
        raise NotFound(f"model {model_id} was deleted")
    task.result()
