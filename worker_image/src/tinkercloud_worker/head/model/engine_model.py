"""One model in the engine: its turns on the engine's thread, its training state and gradient."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from tinkercloud_protocol.requests.hyperparameters import AdamParams
from tinkercloud_protocol.wire.errors import StateLost, Unavailable
from tinkercloud_worker.engine.batch import Batch
from tinkercloud_worker.engine.trainer import (
    Gradient,
    GradientLost,
    LossOutput,
    OptimizerStep,
    Publication,
    TrainingPass,
    TrainingState,
    WeightsCopy,
)
from tinkercloud_worker.engine.turns.engine_thread import Unshared
from tinkercloud_worker.engine.turns.fair_queue import Share
from tinkercloud_worker.head.backend import Backend

_STEP_TOKENS = 8
"""Tokens that an optimizer step counts as, between owners that wait for their turn: those that an
8B model computes in the time of a step of rank 32."""

T = TypeVar("T")


class EngineModel:
    """One model in the engine. Belongs to one event loop.

    All methods that use the engine raise `StateLost` if it has lost the model; the message says
    what to resume from.
    """

    def __init__(
        self, name: str, owner: str, backend: Backend, on_lost: Callable[[], str | None]
    ) -> None:
        """Create it; the engine need not have the model yet.

        Args:
            name: the model.
            owner: its owner.
            backend: the parts of the head.
            on_lost: called when the engine has lost the model; returns the checkpoint to resume
                from, if there is one.
        """
        self._name = name
        self._owner = owner
        self._backend = backend
        self._on_lost = on_lost
        self.is_followed: Callable[[], bool] = lambda: False
        """Says whether a request has arrived that computes as soon as the running one has ended
        (`ModelQueue.is_followed`). May be called on any thread."""
        self.gradient_lost: str | None = None
        """How the gradient was lost; None once a request has reported it."""
        self.is_lost = False
        """Whether the engine has lost the model."""
        self._not_started: set[object] = set()
        """Jobs without a share that wait for the engine's thread."""

    async def run_pass(self, batch: Batch) -> LossOutput:
        """Run a batch in turn with other models."""
        batcher = self._backend.trainer.batcher
        if self._backend.config.durability.exact:
            batcher = Unshared(batcher)
        share = Share(self._owner, self._name, batch.num_tokens, is_followed=self.is_followed)
        queued = self._backend.thread.run_batched(batcher, TrainingPass(self._name, batch), share)
        return await self._unless_lost(queued)

    async def step(self, params: AdamParams) -> Mapping[str, float]:
        """Apply the gradient in turn with other models; return the metrics."""
        share = Share(
            self._owner, self._name, _STEP_TOKENS, continues=True, is_followed=self.is_followed
        )
        step = OptimizerStep(self._name, params)
        queued = self._backend.thread.run_batched(self._backend.trainer.stepper, step, share)
        return await self._unless_lost(queued)

    def why_waiting(self) -> str | None:
        """Return how much is computed before the running request; None if it does not wait."""
        before = self._backend.thread.why_waiting(self._owner, self._name)
        if before is None and self._not_started:
            return "waiting for the engine, which computes for another request"
        return before

    async def run(self, job: Callable[[], None]) -> None:
        """Run a job on the engine's thread."""
        started = self._started_by(job)
        await self._unless_lost(self._backend.thread.run(lambda _: started()))

    async def run_lightweight(self, job: Callable[[], T]) -> T:
        """Run a lightweight job on the engine's thread."""
        started = self._started_by(job)
        return await self._unless_lost(self._backend.thread.run_lightweight(started))

    def _started_by(self, job: Callable[[], T]) -> Callable[[], T]:
        """Return a job that counts as waiting until it starts."""
        self._not_started.add(token := object())

        def run() -> T:
            self._not_started.discard(token)
            return job()

        return run

    async def _unless_lost(self, result: Awaitable[T]) -> T:
        try:
            return await result
        except StateLost as error:
            self.is_lost = True
            path = self._on_lost()
            if path is None:
                raise
            raise StateLost(
                f"{error.message}: create_training_client_from_state_with_optimizer({path!r})"
            ) from error

    async def copy_weights(self) -> WeightsCopy:
        """Return a copy of the current weights."""
        return await self.run_lightweight(lambda: self._backend.trainer.copy_weights(self._name))

    async def publication(self) -> Publication:
        """Return the current weights, stored where samplers read them."""
        begin = partial(self._backend.trainer.publication, self._name)
        return await _completed(lambda: self.run_lightweight(begin), _stored)

    async def export_state(self) -> TrainingState:
        """Return the training state without the gradient."""
        return await _completed(self.begin_export, asyncio.to_thread)

    async def begin_export(self) -> Callable[[], TrainingState]:
        """See `Trainer.begin_export`."""
        return await self.run_lightweight(partial(self._backend.trainer.begin_export, self._name))

    async def export_gradient(self) -> Gradient | None:
        """Return the gradient, if there is one.

        Raises:
            GradientLost: the gradient was lost, and no request has reported it.
        """
        if self.gradient_lost is not None:
            raise GradientLost(self.gradient_lost)
        return await self.run_lightweight(lambda: self._backend.trainer.export_gradient(self._name))

    async def restore_gradient(self, gradient: Gradient) -> None:
        """Restore the exported gradient.

        Raises:
            InvalidRequest: it does not match the model's configuration.
        """
        await self.run(lambda: self._backend.trainer.import_gradient(self._name, gradient))

    async def remove(self) -> None:
        """Free the model's memory."""
        await self.run_lightweight(lambda: self._backend.trainer.remove_model(self._name))

    def report_lost_gradient(self) -> None:
        """Let the request that uses the gradient fail, once, if it was lost.

        Raises:
            GradientLost: it was.
        """
        reason, self.gradient_lost = self.gradient_lost, None
        if reason is not None:
            raise GradientLost(reason)


async def _completed(
    begin: Callable[[], Awaitable[Callable[[], T]]],
    complete: Callable[[Callable[[], T]], Awaitable[T]],
) -> T:
    """Return a copy; if it is lost with the node that made it, make it once more.

    The second copy is of the state that the surviving nodes have. It equals the first one if no
    request of the model runs meanwhile; otherwise the caller must accept any state between two.

    Args:
        begin: begins the copy, as `Trainer.begin_export` does.
        complete: calls what `begin` returns, on another thread.

    Raises:
        Unavailable: the second copy was lost too.
        StateLost: no surviving node has the model.
    """
    try:
        return await complete(await begin())
    except Unavailable:
        return await complete(await begin())


async def _stored(store: Callable[[], Publication]) -> Publication:
    """Store published weights where samplers read them; remove them if the caller is cancelled."""
    storing = asyncio.create_task(asyncio.to_thread(store))
    # The callable may hold the weights in memory.
    del store
    try:
        return await asyncio.shield(storing)
    except asyncio.CancelledError:
        storing.add_done_callback(_remove)
        raise


def _remove(storing: asyncio.Task[Publication]) -> None:
    if not storing.cancelled() and storing.exception() is None:
        weights = storing.result()
        if not isinstance(weights, WeightsCopy):
            weights.remove()
