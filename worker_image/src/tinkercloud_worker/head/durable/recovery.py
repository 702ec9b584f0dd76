"""Continues a model in this head: from the state of a head that stopped, or that was killed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import structlog

from tinkercloud_protocol.heads.checkpoint_manifest import SuspendedManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.sampling_requests import SampleRequest
from tinkercloud_protocol.wire.errors import InvalidRequest, StateLost, WireError
from tinkercloud_protocol.wire.future_responses import Result
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId
from tinkercloud_worker.head.durable.durable_runs import Durability
from tinkercloud_worker.head.durable.journal_replay import mark_read, published_sessions, repeated
from tinkercloud_worker.head.durable.kept_journals import Kept
from tinkercloud_worker.head.durable.suspension import StoredState, Suspension
from tinkercloud_worker.head.model.live_model import LiveModel, new_model
from tinkercloud_worker.head.order.attempts import EndsHeads
from tinkercloud_worker.head.order.queue import QueueSnapshot
from tinkercloud_worker.head.order.queued_request import Operation

log = structlog.get_logger(__name__)

_PROGRESS_SECONDS = 5.0
"""Time between two lines of the log that say how many requests were repeated."""

Resumed = tuple[LiveModel, list[SampleRequest]]
"""A model, and the sampling requests to restart."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Finds the latest state of a model, and restores it."""

    suspension: Suspension
    durability: Durability
    _awaited: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By sampling session that a journal publishes: ends when the journal was repeated."""

    async def published(self, session_id: SamplingSessionId) -> None:
        """Return once a session exists again, if a journal that is being repeated publishes it."""
        if (repeating := self._awaited.get(str(session_id))) is not None:
            await asyncio.wait({repeating})

    async def read(self, model_id: ModelId, spec: ModelSpec, accept: Callable[[], None]) -> Resumed:
        """Restore a model that the head of `spec.resume_generation` had; see `Suspension.resume`.

        Raises:
            StateLost: neither a suspended state nor a journal of that head exists.
        """
        generation = spec.resume_generation or ""
        store = self.suspension.backend.store
        manifest = await store.find_suspended(str(model_id))
        if manifest is not None and manifest.continues_from(generation):
            return await self.resume(model_id, spec, manifest, accept)
        kept = await self.durability.kept.find(str(model_id), spec)
        if kept is None:
            raise StateLost(
                f"the last head of training run {model_id} did not suspend it, and left no journal"
            )
        try:
            model, unfinished = await self._continue(model_id, spec, kept, accept)
        except InvalidRequest as error:
            # A file of its snapshot is damaged.
            copy = None
            if kept.place is None:
                copy = await self.durability.kept.find_copy(str(model_id), spec, error.message)
            if copy is None:
                raise
            kept = copy
            model, unfinished = await self._continue(model_id, spec, kept, accept)
        self._await_samplers(model)
        own = self.suspension.backend.config.generation
        model.lineage = [each for each in kept.manifest.generations if each != own]
        log.info(
            "continuing from the journal", model_id=str(model_id), num_records=len(kept.records)
        )
        return model, unfinished

    def _await_samplers(self, model: LiveModel) -> None:
        """Make samples of sessions that are published again wait until that has happened."""
        repeating = asyncio.create_task(_repeat(model))
        sessions = published_sessions(model.model_id, model.queue.snapshot().waiting)
        for session_id in sessions:
            self.suspension.samplers.record_owner(session_id, model.spec.owner)
            self._awaited[str(session_id)] = repeating

        def forget(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                task.exception()
            for session_id in sessions:
                self._awaited.pop(str(session_id), None)

        repeating.add_done_callback(forget)

    async def resume(
        self,
        model_id: ModelId,
        spec: ModelSpec,
        manifest: SuspendedManifest,
        accept: Callable[[], None],
    ) -> Resumed:
        """Restore a model from this suspended state; see `Suspension.resume`."""
        store = self.suspension.backend.store
        prepare = partial(self.durability.begin_from, state=manifest, store=store)
        try:
            return await self.suspension.resume(
                model_id, spec, StoredState(manifest, store, prepare), accept
            )
        except BaseException:
            has_journal = self.durability.of(str(model_id)) is not None
            await self.durability.leave(str(model_id))
            if has_journal and await self._is_stored(manifest):
                # The journal has nothing else, and would be out of date soon.
                await self.durability.remove(str(model_id))
            raise

    async def _is_stored(self, manifest: SuspendedManifest) -> bool:
        """Return whether a suspended state is known to exist still."""
        try:
            found = await self.suspension.backend.store.find_suspended(manifest.run_id)
        except WireError:
            return False
        return found is not None and found.data_prefix == manifest.data_prefix

    @asynccontextmanager
    async def _leaving_after_failure(self, model_id: ModelId) -> AsyncIterator[None]:
        """Write nothing more to the journal of a model that could not be continued."""
        try:
            yield
        except BaseException:
            await self.durability.leave(str(model_id))
            raise

    async def _continue(
        self, model_id: ModelId, spec: ModelSpec, kept: Kept, accept: Callable[[], None]
    ) -> Resumed:
        async with self._leaving_after_failure(model_id):
            if kept.snapshot is None:
                return await self._create_again(model_id, spec, kept, accept), []
            prepare = partial(self.durability.take_over, kept=kept)
            state = StoredState(kept.snapshot, self.durability.store, prepare, kept.records)
            return await self.suspension.resume(model_id, spec, state, accept)

    async def _create_again(
        self, model_id: ModelId, spec: ModelSpec, kept: Kept, accept: Callable[[], None]
    ) -> LiveModel:
        suspension, manifest = self.suspension, kept.manifest
        fingerprint = suspension.backend.base_fingerprint
        if None not in {manifest.base_fingerprint, fingerprint} and (
            manifest.base_fingerprint != fingerprint
        ):
            raise InvalidRequest(
                f"training run {model_id} can't be continued: the base model differs from the one"
                f" that it was started with (fingerprint {manifest.base_fingerprint} then,"
                f" {fingerprint} now); serve the {manifest.base_model} that it was trained on"
            )
        model = new_model(
            model_id, spec, suspension.backend, suspension.samplers, suspension.results
        )
        model.operations.initial_seed = manifest.initial_seed
        try:
            waiting = await asyncio.to_thread(repeated, model, kept.records, 1, set[int]())
            model.operations.repeated_until = max((each.seq_id for each in waiting), default=-1)
            await self.durability.take_over(model, kept)
            accept()
        except BaseException:
            model.queue.close("the model could not be continued")
            suspension.backend.curves.depart(str(model_id), model.operations.curve)
            raise
        model.queue.submit(0, b"create", 0, Operation(partial(_create_again, model)))
        model.queue.restore(QueueSnapshot(0, waiting, None))
        mark_read(suspension.results, kept.records)
        return model


async def _create_again(model: LiveModel) -> Result:
    """Create a model that another head had created, unless that has ended too many heads."""
    try:
        async with model.queue.log.repeating(0):
            return await model.operations.create()
    except EndsHeads as error:
        model.operations.refuse(error.message)
        raise
    except WireError as error:
        if error.category != "user":
            # Such as too little memory. The journal has the run: nothing may replace that.
            model.lacks_journal = error.message
        raise


async def _repeat(model: LiveModel) -> None:
    """Return once a model has run the requests so far; log how many until then.

    Raises:
        Unavailable: its queue was closed.
    """
    repeating = asyncio.ensure_future(model.queue.run_after_accepted(_do_nothing))
    while not (await asyncio.wait({repeating}, timeout=_PROGRESS_SECONDS))[0]:
        if (progress := model.queue.repetition) is not None:
            log.info("continuing from the journal", model_id=str(model.model_id), progress=progress)
    await repeating


async def _do_nothing() -> None:
    """Stands for work that runs after the requests so far."""
