"""Saves the models of a head automatically, so that a head that is killed does not lose them.

One task serves all models and saves one at a time, the one that has been due for longest first. So
at most one copy of a model is in memory, however slow the store is, and a model that falls behind
is saved in its newest state. Only the copy is made on the engine's thread, between two jobs; other
threads encode and write it, while training continues.

A failed save is tried again after growing pauses. It is in the log, in the metrics, and in the
head's list of models.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

import structlog

from tinkercloud_worker import metrics
from tinkercloud_worker.checkpoints.store import StoreFailed
from tinkercloud_worker.head.model.live_model import LiveModel
from tinkercloud_worker.head.model.save_schedule import Backoff
from tinkercloud_worker.head.wire.failed_results import error_message, to_result

log = structlog.get_logger(__name__)


class Autosaver:
    """Saves the models of one head. Belongs to one event loop."""

    def __init__(self, models: Mapping[str, LiveModel]) -> None:
        """Start.

        Args:
            models: the models in memory, by id. Each must have been passed to `watch`.
        """
        self._models = models
        self._wake = asyncio.Event()
        self._saving: tuple[LiveModel, asyncio.Task[None]] | None = None
        self._saving_last = asyncio.Lock()
        self._store = Backoff()
        """Failures of the store concern all models. Trying each would copy each in vain."""
        metrics.AUTOSAVE_FAILING.set_function(self._count_failing)
        self._worker = asyncio.create_task(self._work())

    def watch(self, model: LiveModel) -> None:
        """Save this model when it is due, as long as it is in memory."""
        model.operations.on_change = self._wake.set
        self._wake.set()

    async def discard(self, model: LiveModel) -> None:
        """Delete the automatic checkpoints of a deleted model.

        If the engine has lost the model, they are kept: an error has named the latest of them.
        """
        if self._saving is not None and self._saving[0] is model:
            # Not cancelled: the store may complete a write whose caller has left.
            await asyncio.wait({self._saving[1]})
        if not model.operations.engine.is_lost:
            await model.operations.checkpoints.remove_autosaves()

    async def save_last(self, only: str = "") -> list[str]:
        """Write last checkpoints instead of automatic ones; return the paths.

        If a model can't be saved, the others are, before its failure is raised.

        Args:
            only: the id of one model; otherwise all models are saved.
        """
        async with self._saving_last:
            if self._saving is not None and only in {"", str(self._saving[0].model_id)}:
                # Not awaited: a store that hangs would delay the last checkpoint.
                self._saving[1].cancel()
            models = [model for name, model in self._models.items() if only in {"", name}]
            try:
                return await _save_all(models)
            finally:
                self._wake.set()

    def close(self) -> None:
        """Save nothing from now on; abandon the save that runs. Idempotent."""
        self._worker.cancel()
        if self._saving is not None:
            self._saving[1].cancel()

    def _count_failing(self) -> int:
        schedules = [model.operations.schedule for model in self._models.values()]
        return sum(schedule.failure is not None for schedule in schedules)

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            due = self._next_due()
            if due is None:
                await self._wake.wait()
            elif (pause := max(due[0], self._store.retry_at) - time.monotonic()) > 0:
                await _wait(self._wake, pause)
            else:
                await self._save(due[1])

    def _next_due(self) -> tuple[float, LiveModel] | None:
        if self._saving_last.locked():
            return None
        dues = [
            (due, model)
            for model in self._models.values()
            if model.operations.refused is None
            and (due := model.operations.schedule.due_at()) is not None
        ]
        return min(dues, key=lambda each: each[0], default=None)

    async def _save(self, model: LiveModel) -> None:
        name, began = str(model.model_id), time.monotonic()
        task = asyncio.create_task(model.operations.autosave())
        self._saving = (model, task)
        await asyncio.wait({task})
        self._saving = None
        if task.cancelled() or self._models.get(name) is not model:
            return
        schedule, error = model.operations.schedule, task.exception()
        if error is None:
            self._store.succeeded()
            metrics.AUTOSAVES.inc()
            metrics.AUTOSAVE_SECONDS.observe(time.monotonic() - began)
            log.debug("autosaved", model_id=name)
            return
        reason = error_message(to_result(error)) if isinstance(error, Exception) else repr(error)
        schedule.failed(time.monotonic(), reason)
        if isinstance(error, StoreFailed):
            self._store.failed(time.monotonic())
        metrics.AUTOSAVE_FAILURES.inc()
        log.warning(
            "autosave failed; training continues, and the save is tried again",
            model_id=name,
            unsaved_steps=schedule.unsaved,
            reason=reason,
        )


async def _save_all(models: Sequence[LiveModel]) -> list[str]:
    """Write the last checkpoints of all models that accept requests; then raise the first error."""
    paths: list[str] = []
    failures: list[Exception] = []
    for model in models:
        if model.operations.refused is not None:
            continue
        try:
            paths.append(await model.operations.save_last())
        except Exception as error:  # noqa: BLE001 - raised when all others are saved
            log.warning("no last checkpoint", model_id=str(model.model_id), reason=repr(error))
            failures.append(error)
    if failures:
        raise failures[0]
    return paths


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but not longer than this."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
