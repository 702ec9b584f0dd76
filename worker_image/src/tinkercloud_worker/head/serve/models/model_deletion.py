"""Deletes models in any state."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tinkercloud_worker.head.durable.durable_runs import Durability
from tinkercloud_worker.head.model.autosaver import Autosaver
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.model.model_lifetime import ModelEvent, ModelState
from tinkercloud_worker.head.model.model_registry import ModelRegistry
from tinkercloud_worker.head.order.kept_results import Results

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task that ends with the head."""

_CANCELLED = frozenset(
    {
        ModelState.SUSPENDING,
        ModelState.MOVING,
        ModelState.RESUMING,
        ModelState.RETURNING,
        ModelState.RECOVERING,
        ModelState.AWAITED,
    }
)
"""States whose tasks are cancelled. Others free the memory of the model, or start its journal."""


@dataclass(frozen=True, slots=True)
class ModelDeletion:
    """Deletes models of one head; concurrent callers share one deletion."""

    models: ModelRegistry
    results: Results
    durability: Durability
    autosaver: Autosaver
    spawn: Spawn

    async def delete(self, name: str) -> None:
        """Remove a model, which may be unknown."""
        if not self.models.state(name).is_being_deleted:
            removal = self._removal(name)
            self.models.apply(name, ModelEvent.DELETE)
            self.models.start(name, self.spawn(removal))
        if (task := self.models.task(name)) is not None:
            await asyncio.shield(task)

    def _removal(self, name: str) -> Coroutine[Any, Any, None]:
        """Return the work that removes a model, from the state that it is in now."""
        state, task = self.models.state(name), self.models.task(name)
        model = self.models.in_memory.get(name)
        if state is ModelState.NEW:
            return self._remove(name, model, starting=task)
        if task is not None and state in _CANCELLED:
            task.cancel()
        return self._remove(name, model, ending=task)

    async def _remove(
        self,
        name: str,
        model: LiveModel | None,
        *,
        ending: asyncio.Task[Any] | None = None,
        starting: asyncio.Task[Any] | None = None,
    ) -> None:
        """Remove a model.

        Args:
            name: its id.
            model: the model, if it was in memory.
            ending: what to wait for first.
            starting: starts its journal, and notices by itself that the model was deleted.
        """
        try:
            if ending is not None:
                await asyncio.wait({ending})
            if model is not None:
                model.queue.close(
                    f"model {name} was deleted: its run was stopped, or its session ended;"
                    f" `tinkercloud runs show {name}` says by whom, and where it can continue"
                )
                self.results.abandon(name)
                await model.operations.delete()
                _in_background = self.spawn(self.autosaver.discard(model))
            await self.durability.remove(name)
        finally:
            if starting is None or starting.done():
                self.models.apply(name, ModelEvent.REMOVED)
            else:
                self.models.apply(name, ModelEvent.REMOVED_EARLY)
                self.models.start(name, self.spawn(self._end(name, starting)))

    async def _end(self, name: str, starting: asyncio.Task[Any]) -> None:
        await asyncio.wait({starting})
        self.models.apply(name, ModelEvent.REMOVED)
