"""Writes live models to the object store, and restores them in this or another head.

The state has everything that a client can observe: weights, optimizer, the unapplied gradient,
queued requests, results that a client may still poll for, and samplers whose weights were never
saved under a name. Training continues bit for bit.

Samplers are kept from the latest on, up to `Limits.max_sampler_bytes`; results as `Results.export`
selects them.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from pydantic import ValidationError

from tinkercloud_protocol.heads.checkpoint_manifest import (
    BODIES,
    GRADIENT,
    HEAD_STATE,
    SuspendedManifest,
    base_mismatch,
)
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.sampling_requests import SampleRequest
from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.errors import (
    InvalidRequest,
    NotFound,
    StateLost,
    Unavailable,
    WireError,
)
from tinkercloud_protocol.wire.future_responses import Result
from tinkercloud_protocol.wire.ids import ModelId, RequestId
from tinkercloud_protocol.wire.json_model import describe
from tinkercloud_worker.checkpoints import formats
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.checkpoints.suspended import (
    Bodies,
    HeadState,
    StoredRequest,
    StoredResult,
    StoredSampler,
    SuspendedHead,
)
from tinkercloud_worker.engine.trainer import (
    Gradient,
    GradientLost,
    TrainingState,
    WeightsCopy,
)
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.durable.journal_replay import (
    mark_read,
    repeated,
    restored_operation,
    unfinished_samples,
)
from tinkercloud_worker.head.durable.state_writer import StateWriter
from tinkercloud_worker.head.model.live_model import LiveModel, new_model
from tinkercloud_worker.head.order.kept_results import ExportedResult, Results
from tinkercloud_worker.head.order.queue import QueueSnapshot
from tinkercloud_worker.head.order.queued_request import QueuedRequest
from tinkercloud_worker.head.sampling.samplers import Published, Samplers
from tinkercloud_worker.head.wire.failed_results import Moved
from tinkercloud_worker.journal.records import Record

log = structlog.get_logger(__name__)

_UPLOAD_INTERRUPTED = "the session head stopped before the upload finished; save again"


async def _nothing(model: LiveModel) -> None:
    """Stands for a preparation until there is one."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state of a model, and where it is."""

    manifest: SuspendedManifest
    store: CheckpointStore
    prepare: Callable[[LiveModel], Awaitable[None]] = _nothing
    """Called before any of the model's requests can run."""
    later: Sequence[Record] = ()
    """Requests that followed the state, from a journal."""


class SamplersLeftBehind(WireError):
    """Some samplers of a model can't be written with it."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """Suspends and resumes the models of one head."""

    backend: Backend
    results: Results
    samplers: Samplers

    async def write(
        self, model: LiveModel, unfinished: Sequence[SampleRequest], store: CheckpointStore
    ) -> None:
        """Write a model whose queue is paused.

        Args:
            model: the model.
            unfinished: sampling requests to the model's own samplers, to restart later.
            store: where to write.

        Raises:
            Moved: another head has continued the model.
        """
        limit = self.backend.config.limits.max_sampler_bytes
        writer, published = self.writer(model, store), self.samplers.of_model(model.model_id)
        samplers = await self.write_samplers(published, model.model_id, writer, limit)
        await self._write_rest(model, unfinished, samplers, writer)

    async def write_all(
        self, model: LiveModel, unfinished: Sequence[SampleRequest] = ()
    ) -> SuspendedManifest:
        """Write a model whose queue is paused, with all samplers.

        Args:
            model: the model.
            unfinished: sampling requests to the model's own samplers, to restart later.

        Raises:
            SamplersLeftBehind: some samplers can't be written; then nothing was.
            Moved: another head has continued the model.
        """
        limit = self.backend.config.limits.max_snapshot_bytes
        writer = self.writer(model, self.backend.store)
        published = self.samplers.of_model(model.model_id)
        samplers = await self.write_samplers(published, model.model_id, writer, limit)
        sessions = {session for sampler in published for session in sampler.sessions}
        written = {session for sampler in samplers for session in sampler.sessions}
        stored = {each.session for each in self.samplers.evicted.find(sessions)}
        if missing := sessions - written - stored:
            raise SamplersLeftBehind(f"the weights of {sorted(missing)} could not be written")
        return await self._write_rest(model, unfinished, samplers, writer)

    def writer(self, model: LiveModel, store: CheckpointStore) -> StateWriter:
        """Return the writer of a model's state."""
        config = self.backend.config
        manifest = SuspendedManifest(
            run_id=str(model.model_id),
            generation=config.generation,
            continues=model.lineage,
            owner=model.spec.owner,
            base_model=config.model.name,
            base_fingerprint=self.backend.base_fingerprint,
            lora=model.spec.lora,
            step=model.operations.steps,
            created_at=model.operations.checkpoints.next_moment(),
            data_prefix=uuid.uuid4().hex,
            files={},
        )
        return StateWriter(store, manifest)

    async def _write_rest(
        self,
        model: LiveModel,
        unfinished: Sequence[SampleRequest],
        samplers: list[StoredSampler],
        writer: StateWriter,
    ) -> SuspendedManifest:
        """Write everything except the samplers, and the manifest last."""
        model.check_complete()
        bodies = Bodies()
        head = self.head_state(model, unfinished, bodies)
        gradient_lost = await _write_training(model, self.backend.config.model.name, writer)
        head = head.model_copy(update={"samplers": samplers, "gradient_lost": gradient_lost})
        await writer.put(HEAD_STATE, head.model_dump_json().encode())
        await writer.put(BODIES, bodies.encode())
        await self._check_owned(model, writer)
        return await writer.commit()

    async def _check_owned(self, model: LiveModel, writer: StateWriter) -> None:
        """Check that no other head has continued the model: its state would be replaced.

        Raises:
            Moved: one has.
        """
        await model.queue.log.check_owned()
        own = self.backend.config.generation
        earlier = await writer.replaced()
        if (
            earlier is not None
            and own in earlier.continues
            and earlier.generation not in {own, *model.lineage}
        ):
            raise Moved(str(model.model_id))

    def head_state(
        self, model: LiveModel, unfinished: Sequence[SampleRequest], bodies: Bodies
    ) -> HeadState:
        """Return the state of a model of which no request runs, without weights and samplers."""
        state = model.queue.snapshot()
        samples = [bodies.add(request.model_dump_json().encode()) for request in unfinished]
        return HeadState(
            refused=model.operations.refused,
            next_seq_id=state.next_seq_id,
            failure=state.failure,
            waiting=[_stored_request(waiting, bodies) for waiting in state.waiting],
            results=[_stored_result(kept, bodies) for kept in self._kept_results(model, state)],
            samples=samples,
            samplers=[],
            evicted=self.samplers.evicted.find(self.samplers.unnamed_of_model(model.model_id)),
            keys=model.given_numbers.keys,
            unsaved_changes=model.operations.schedule.unsaved,
            latest_checkpoint=model.operations.checkpoints.to_resume_from(),
            curve=bodies.add(
                model.operations.curve.stored(has_gradient=not state.has_dirty_gradient)
            ),
        )

    def _kept_results(self, model: LiveModel, state: QueueSnapshot) -> list[ExportedResult]:
        targets = {str(model.model_id), *self.samplers.sessions_of_model(model.model_id)}
        waiting = {model.queue.request_id(waiting.seq_id) for waiting in state.waiting}
        kept = self.results.export(lambda request_id: request_id.rpartition(":")[0] in targets)
        # Background work of a paused queue is an upload. Its place in the order has passed, so it
        # can't be repeated.
        interrupted = [
            request_id
            for request_id in self.results.unfinished()
            if request_id.rpartition(":")[0] == str(model.model_id) and request_id not in waiting
        ]
        failure = future_responses.failed(_UPLOAD_INTERRUPTED, "server")
        return kept + [
            ExportedResult(name, self.results.digest(name) or b"", failure, is_read=False)
            for name in interrupted
        ]

    async def write_samplers(
        self,
        samplers: Sequence[Published],
        model_id: ModelId,
        writer: StateWriter,
        limit: int,
    ) -> list[StoredSampler]:
        """Write some of the model's own samplers, the latest first, up to `limit` bytes.

        Those that were evicted meanwhile are stored when this returns.
        """
        stored: list[StoredSampler] = []
        for published in samplers:
            room = limit - writer.size_of(formats.SAMPLER_PREFIX)
            if published.size_bytes > room:
                log.warning(
                    "older samplers were not written: limit reached",
                    model_id=str(model_id),
                    kept=len(stored),
                )
                break
            try:
                weights = await self.backend.sampler.export(published.version)
            except NotFound:
                continue
            except WireError as error:
                # The model itself can still be written.
                log.warning(
                    "a sampler was not written", model_id=str(model_id), reason=error.message
                )
                continue
            assert weights is not None  # noqa: S101 - None is a base model's, never a model's own
            name, content = await asyncio.to_thread(formats.encode_sampler, weights)
            if len(content) > room:
                reason = f"its file has {len(content)} bytes, and {room} are left"
                log.warning("a sampler was not written", model_id=str(model_id), reason=reason)
                continue
            await writer.put(name, content)
            sessions, inflight = list(published.sessions), published.is_inflight
            stored.append(
                StoredSampler(
                    sessions=sessions,
                    is_inflight=inflight,
                    lora=weights.lora,
                    file=name,
                    step=published.step,
                )
            )
        await self.samplers.settled()
        return stored

    async def resume(
        self, model_id: ModelId, spec: ModelSpec, stored: StoredState, accept: Callable[[], None]
    ) -> tuple[LiveModel, list[SampleRequest]]:
        """Restore a model; return it with the sampling requests to restart.

        Args:
            model_id: the model.
            spec: its expected specification.
            stored: its state.
            accept: raises if the head accepts no more models. Called last, before any of the
                model's requests can run.

        Raises:
            StateLost: the state is one of another model.
            InvalidRequest: the state is damaged, or was trained on another base.
            Unavailable: the trainer lost the model meanwhile; the state still exists.
        """
        store, manifest = stored.store, stored.manifest
        self._check_fits(manifest, spec)
        files = {name: await store.read_file(manifest, name) for name in (HEAD_STATE, BODIES)}
        head = SuspendedHead(manifest, files)
        model = new_model(model_id, spec, self.backend, self.samplers, self.results)
        try:
            await self._restore_weights(model, stored, head.state)
            await self._restore_samplers(model_id, stored, head.state)
            own = self.backend.config.generation
            model.operations.schedule.changed(time.monotonic(), head.state.unsaved_changes)
            model.lineage = [each for each in manifest.lineage if each != own]
            model.operations.checkpoints.continue_after(manifest.created_at)
            model.operations.checkpoints.inherited = head.state.latest_checkpoint
            later = await asyncio.to_thread(
                repeated,
                model,
                stored.later,
                head.state.next_seq_id,
                {waiting.seq_id for waiting in head.state.waiting},
            )
            model.operations.repeated_until = max((each.seq_id for each in later), default=-1)
            await stored.prepare(model)
            accept()
            if manifest.generation == own:
                # The catalog names this head: once the model has changed, no other head may resume
                # it from this state.
                await store.withdraw_suspended(manifest)
            elif own in manifest.lineage:
                # The model has come back from another head. Once the catalog names this head again,
                # no other head may resume it from this state.
                left = [each for each in manifest.continues if each != own]
                await store.commit_suspended(manifest.model_copy(update={"continues": left}))
            self._restore_order(model, head, later)
            mark_read(self.results, stored.later)
        except BaseException as error:
            model.queue.close("the model could not be resumed")
            await model.operations.delete()
            if isinstance(error, StateLost | GradientLost):
                raise Unavailable(
                    f"training run {model_id} can't be resumed now ({error.message}); send the"
                    " request again"
                ) from error
            raise
        return model, unfinished_samples(head)

    def _check_fits(self, manifest: SuspendedManifest, spec: ModelSpec) -> None:
        written = (manifest.base_model, manifest.owner, manifest.lora)
        if written != (self.backend.config.model.name, spec.owner, spec.lora):
            raise StateLost(f"{manifest} belongs to a model with another configuration")
        mismatch = base_mismatch(manifest, self.backend.base_fingerprint)
        if mismatch is not None:
            raise InvalidRequest(f"{manifest} can't be resumed: {mismatch}")

    async def _restore_weights(
        self, model: LiveModel, stored: StoredState, head: HeadState
    ) -> None:
        if head.refused is not None:
            model.operations.refuse(head.refused)
            return
        await model.operations.restore(await self._read_state(stored))
        if head.gradient_lost is not None:
            model.operations.engine.gradient_lost = head.gradient_lost
        if GRADIENT in stored.manifest.files:
            await model.operations.engine.restore_gradient(
                await self._read_tensors(stored, GRADIENT)
            )

    async def _read_state(self, stored: StoredState) -> TrainingState:
        manifest = stored.manifest
        names = formats.files_of_state(manifest)
        files = {name: await stored.store.read_file(manifest, name) for name in names}
        return await asyncio.to_thread(formats.decode_state, manifest, files)

    async def _read_tensors(self, stored: StoredState, name: str) -> Gradient:
        manifest = stored.manifest
        content = await stored.store.read_file(manifest, name)
        return await asyncio.to_thread(formats.decode_tensors, manifest, {name: content}, name)

    async def _restore_samplers(
        self, model_id: ModelId, state: StoredState, head: HeadState
    ) -> None:
        """Publish the samplers that were not evicted, the oldest first; read each file once."""
        # Those that were evicted while the state was written are in both lists.
        written = {session for each in head.samplers for session in each.sessions}
        self.samplers.restore_evicted(
            model_id, [each for each in head.evicted if each.session not in written]
        )
        read: dict[str, WeightsCopy] = {}
        for stored in reversed(head.samplers):
            if stored.file not in read:
                tensors = await self._read_tensors(state, stored.file)
                read[stored.file] = WeightsCopy(stored.lora, tensors)
            weights, inflight = read[stored.file], stored.is_inflight
            published = Published(
                stored.file, stored.sessions, inflight, weights.size_bytes, stored.step
            )
            await self.samplers.restore(model_id, published, weights)

    def _restore_order(
        self, model: LiveModel, head: SuspendedHead, later: Sequence[QueuedRequest]
    ) -> None:
        """Restore the curve, results and requests; the model's queue runs from here on."""
        _restore_curve(model, head)
        waiting = [
            QueuedRequest(
                stored.seq_id,
                restored_operation(
                    model, stored.seq_id, stored.path, stored.role, head.body(stored.body)
                ),
                bytes.fromhex(stored.digest),
                stored.size,
                stored.knows_of,
            )
            for stored in head.state.waiting
        ]
        for kept in head.state.results:
            result = Result(head.body(kept.body), kept.content_type)
            digest = bytes.fromhex(kept.digest)
            self.results.restore(
                ExportedResult(kept.request_id, digest, result, kept.is_read), model.spec.owner
            )
            request_id = RequestId.parse(kept.request_id)
            if request_id.target == model.model_id:
                model.queue.sequencer.recall(request_id.seq_id, digest)
        state = head.state
        for key, seq_id in state.keys.items():
            model.given_numbers.record(seq_id, key)
        # The outcome of a request that waited in the state may be among the later ones.
        requests = list({each.seq_id: each for each in (*waiting, *later)}.values())
        model.queue.restore(QueueSnapshot(state.next_seq_id, requests, state.failure))


def _restore_curve(model: LiveModel, head: SuspendedHead) -> None:
    if head.state.curve is None:
        return
    try:
        model.operations.curve.restore(head.body(head.state.curve))
    except ValidationError as error:
        log.warning(
            "the curve of a run starts at this step: this release can't read its earlier part",
            model_id=str(model.model_id),
            error=describe(error),
        )


async def _write_training(model: LiveModel, base_model: str, writer: StateWriter) -> str | None:
    """Write the state and the gradient; return how the gradient was lost, if it was."""
    operations = model.operations
    if operations.refused is not None:
        return None
    await writer.put_state(
        partial(formats.encode_state, await operations.engine.export_state(), base_model)
    )
    if not model.queue.snapshot().has_dirty_gradient:
        try:
            gradient = await operations.engine.export_gradient()
        except GradientLost as error:
            return error.message
        if gradient is not None:
            await writer.put_gradient(gradient)
    return None


def _stored_request(waiting: QueuedRequest, bodies: Bodies) -> StoredRequest:
    source = waiting.operation.source
    assert source is not None  # noqa: S101 - only the creation has none, and that has run
    return StoredRequest(
        seq_id=waiting.seq_id,
        path=source.path,
        body=bodies.add(source.body),
        role=waiting.operation.role,
        digest=waiting.digest.hex(),
        size=waiting.size,
        knows_of=waiting.acknowledged_failure,
    )


def _stored_result(kept: ExportedResult, bodies: Bodies) -> StoredResult:
    return StoredResult(
        request_id=kept.request_id,
        digest=kept.digest.hex(),
        body=bodies.add(kept.result.body),
        content_type=kept.result.content_type,
        is_read=kept.is_read,
    )
