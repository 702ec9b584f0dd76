"""Executes training requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import structlog

from tinkercloud_protocol.heads.autosave import AutosaveConfig
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.tensors import ForwardBackwardRequest
from tinkercloud_protocol.requests.training_requests import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkercloud_protocol.wire import future_responses
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.future_responses import Result
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath
from tinkercloud_worker.checkpoints import encryption, formats
from tinkercloud_worker.custom_losses.uploaded import UploadedLoss
from tinkercloud_worker.engine.batch import Batch, prepare, prepare_custom
from tinkercloud_worker.engine.trainer import (
    GradientLost,
    Publication,
    TrainingState,
)
from tinkercloud_worker.engine.turns.usage_counts import Payer, Usage
from tinkercloud_worker.head.backend import Backend, random_seed
from tinkercloud_worker.head.model.engine_model import EngineModel
from tinkercloud_worker.head.model.model_checkpoints import ModelCheckpoints
from tinkercloud_worker.head.model.preparation import encode_output, is_small
from tinkercloud_worker.head.model.save_schedule import SavePoint, SaveSchedule
from tinkercloud_worker.head.model.saved_model import SavedModel, read_checkpoint
from tinkercloud_worker.head.model.session_losses import SessionLosses
from tinkercloud_worker.head.sampling.samplers import Samplers
from tinkercloud_worker.head.wire.request_times import count_tokens
from tinkercloud_worker.training import external_weights

log = structlog.get_logger(__name__)

NOT_CREATED = "the model has not been created yet"
"""Why a new model accepts no requests (`Operations.refused`)."""

_REPEATED_LOSS_ALLOWANCE = 5.0
"""How much longer than the limits a custom loss may take that a journal repeats: it succeeded in
time before, and now all owners' losses are repeated at once."""

T = TypeVar("T")
Outcome = Result | Awaitable[Result]


class Operations:
    """Executes the requests of one model. Its queue calls the methods in order."""

    def __init__(
        self, model_id: ModelId, spec: ModelSpec, backend: Backend, samplers: Samplers
    ) -> None:
        self._model_id = model_id
        self._name = str(model_id)
        self._spec = spec
        self._backend = backend
        self._samplers = samplers
        self._losses = SessionLosses(model_id.session_id, backend.store)
        self.checkpoints = ModelCheckpoints(self._name, spec, backend)
        config = backend.config.autosave
        self.schedule = SaveSchedule(
            config if config.applies_to(spec.lora) else AutosaveConfig(steps=0, seconds=0)
        )
        """When the head saves the model by itself; it counts steps and loads."""
        self.on_change: Callable[[], None] = _do_nothing
        """Called after each change that the schedule counts."""
        self.engine = EngineModel(self._name, spec.owner, backend, self._engine_lost)
        """The model in the engine."""
        self.curve = backend.curves.begin(self._name, spec.owner)
        """What its steps report."""
        self._steps = 0
        self.num_changes = 0
        """How often the weights may have changed since this object was created."""
        self.initial_seed = random_seed() if spec.lora is None else _seed_of(spec.lora)
        """Seed of the adapter's initial weights, so that it can be created again."""
        self._refused: str | None = NOT_CREATED
        self.repeated_until = -1
        """Number of the last request that a journal repeats: the head that first ran these has
        counted their tokens."""

    async def create(self) -> Result:
        """Create the model from the base weights or from a checkpoint."""
        self._refused = "the model could not be created"
        spec = self._spec
        _check_supported(spec, self._backend.config.limits.max_lora_rank)
        saved = None
        if spec.restore_from is not None:
            saved = await read_checkpoint(
                self._backend, spec.restore_from, with_optimizer=spec.restore_optimizer
            )
            if saved.state.weights.lora is None and spec.lora is not None:
                raise InvalidRequest(
                    f"{spec.restore_from} holds a fully fine-tuned model, not a LoRA adapter"
                )
        lora = None if spec.lora is None else replace(spec.lora, seed=self.initial_seed)
        await self.engine.run(lambda: self._backend.trainer.add_model(self._name, lora))
        if saved is not None:
            await self._import_first(saved)
        self._refused = None
        log.info("training run created", model_id=self._name)
        answer: dict[str, object] = {"model_id": self._name}
        if spec.restore_from is not None:
            answer["path"] = spec.restore_from
        return future_responses.finished(answer)

    async def forward_backward(self, request: ForwardBackwardRequest) -> Result:
        """Run a batch, and add to the gradient unless the request is forward only."""
        async with self._backend.image_work.room(self._spec.owner, request.images):
            return await self._compute_batch(request)

    async def _compute_batch(self, request: ForwardBackwardRequest) -> Result:
        self._check_alive()
        if not request.forward_only:
            self.engine.report_lost_gradient()
        runs_here, job = is_small(request), await self._preparation(request)
        images = self._backend.image_work
        batch = job() if runs_here else await images.run(len(request.images), job)
        if batch.uploaded is not None:
            # No thread waits for it: those are needed for the requests of all owners.
            await asyncio.wrap_future(batch.uploaded.check_cost(batch.custom_data))
        is_new = request.seq_id > self.repeated_until
        if is_new:
            self._backend.token_limits.spend(self._spec.owner, batch.num_tokens)
        output = await self.engine.run_pass(batch)
        tokens = batch.num_tokens
        usage = Usage(forward_tokens=tokens) if batch.forward_only else Usage(trained_tokens=tokens)
        if is_new:
            self._backend.usage.count(Payer.of_model(self._spec.owner, self._name), usage)
            count_tokens(usage.computed_tokens)
        encode = partial(encode_output, request, batch, output)
        encoded = encode() if runs_here else await asyncio.to_thread(encode)
        if not batch.forward_only:
            self.curve.count_pass(batch, encoded.metrics)
        return Result(encoded.body, future_responses.PROTOBUF)

    async def _preparation(self, request: ForwardBackwardRequest) -> Callable[[], Batch]:
        limits, images = self._backend.trainer.limits, self._backend.images
        if request.loss_fn == "custom":
            definition = await self._losses.definition(request.loss_fn_config)
            is_repeated = request.seq_id <= self.repeated_until
            allowance = _REPEATED_LOSS_ALLOWANCE if is_repeated else 1.0
            uploaded = UploadedLoss(self._backend.losses, self._spec.owner, definition, allowance)
            return partial(prepare_custom, request, uploaded, limits, images)
        return partial(prepare, request, limits, images)

    async def optim_step(self, request: OptimStepRequest) -> Result:
        """Apply the gradient."""
        self._check_alive()
        params = request.adam()
        try:
            self.engine.report_lost_gradient()
            self.num_changes += 1
            try:
                metrics = await self.engine.step(params)
            finally:
                self._count_change()
        except (GradientLost, InvalidRequest):
            # The trainer has zeroed a gradient that is not finite.
            self.curve.refuse_step()
            raise
        self._steps = int(metrics["step"])
        self.curve.count_step(self._steps, params, metrics["grad_norm"])
        return future_responses.finished({"metrics": dict(metrics)})

    async def save_weights(self, request: SaveWeightsRequest) -> Outcome:
        """Write a training checkpoint, including any gradient not yet applied.

        The upload runs in the background.

        Raises:
            GradientLost: the gradient was lost, and no request has reported it.
        """
        self._check_alive()
        path = CheckpointPath(self._name, CheckpointKind.TRAINING, request.name())
        repeated = await self.checkpoints.begin(path, request.seq_id, overwrite=request.overwrite)
        if repeated is not None:
            return _saved(repeated)
        point = self.schedule.begin(time.monotonic())
        # State and gradient are consistent: no other request of this model runs meanwhile.
        state, gradient = await self.engine.export_state(), await self.engine.export_gradient()
        manifest = self.checkpoints.manifest(
            path, state.step, request.ttl_seconds, request.user_metadata, request.seq_id
        )
        encode = partial(formats.encode_training, state, gradient, manifest.base_model)
        uploading = self.checkpoints.upload(manifest, encode, overwrite=request.overwrite)
        if request.ttl_seconds is None:
            # Until the model changes again, it needs no automatic checkpoint.
            uploading.add_done_callback(partial(self._record_saved, point))
        return _saved_result(uploading)

    def _record_saved(self, point: SavePoint, uploading: asyncio.Task[CheckpointManifest]) -> None:
        if not uploading.cancelled() and uploading.exception() is None:
            self.schedule.saved(point)

    async def save_weights_for_sampler(self, request: SaveWeightsForSamplerRequest) -> Outcome:
        """Publish the weights: as a checkpoint, or for one sampling session."""
        self._check_alive()
        if (name := request.name()) is None:
            return await self._publish(request)
        path = CheckpointPath(self._name, CheckpointKind.SAMPLER, name)
        if (repeated := await self.checkpoints.begin(path, request.seq_id)) is not None:
            return _saved(repeated)
        weights = await self.engine.copy_weights()
        manifest = self.checkpoints.manifest(
            path, self._steps, request.ttl_seconds, request.user_metadata, request.seq_id
        )
        encode = partial(formats.encode_weights, weights, manifest.base_model)
        return _saved_result(self.checkpoints.upload(manifest, encode, overwrite=False))

    async def save_weights_external(self, request: SaveWeightsExternalRequest) -> Outcome:
        """Write the weights as files for other programs, encrypted if there are recipients."""
        self._check_alive()
        recipients = encryption.parse_recipients(request.age_encryption_recipients or [])
        path = CheckpointPath(self._name, CheckpointKind.EXTERNAL, request.path)
        if (repeated := await self.checkpoints.begin(path, request.seq_id)) is not None:
            return _saved(repeated)
        weights = await self.engine.copy_weights()
        manifest = self.checkpoints.manifest(
            path, self._steps, request.ttl_seconds, seq_id=request.seq_id
        )
        config = self._backend.config
        plain = partial(external_weights.encode, weights, config.model, config.trainer.dtype)
        encode = partial(encryption.encrypted, plain, recipients) if recipients else plain
        return _saved_result(self.checkpoints.upload(manifest, encode, overwrite=False))

    async def _publish(self, request: SaveWeightsForSamplerRequest) -> Result:
        index = request.sampling_session_seq_id
        assert index is not None  # noqa: S101 - the request has no name
        session_id = SamplingSessionId(self._model_id.session_id, index)
        self._samplers.check_new(session_id)
        weights = await self.publication()
        if request.kind == "inflight":
            publish = self._samplers.publish_inflight
        else:
            publish = self._samplers.publish
        await publish(session_id, self._model_id, weights, self._steps)
        return future_responses.finished({"sampling_session_id": str(session_id)})

    async def publication(self) -> Publication:
        """Return the current weights, stored where samplers read them.

        Raises:
            InvalidRequest: the model accepts no requests.
        """
        self._check_alive()
        return await self.engine.publication()

    async def load_weights(self, request: LoadWeightsRequest) -> Result:
        """Replace the weights by a checkpoint's; reset or replace optimizer state and gradient."""
        self._check_alive()
        await self.checkpoints.settle()
        saved = await read_checkpoint(self._backend, request.path, with_optimizer=request.optimizer)
        try:
            await self._import(saved)
        finally:
            self._count_change()
        return future_responses.finished({"path": request.path, "model_id": self._name})

    async def save_last(self) -> str:
        """Write an automatic training checkpoint, named by its step; return its path.

        It has the state after the last optim_step: a client that resumes from it sends the data of
        the next step again. The call is idempotent.
        """
        point = self.schedule.begin(time.monotonic())
        written = await self.checkpoints.write_state(
            await self.engine.export_state(), lambda step: f"last-step-{step:06d}", overwrite=True
        )
        self.schedule.saved(point)
        await self.checkpoints.remove_autosaves()
        return written.tinker_path

    async def save_state(self, name: str | None) -> CheckpointManifest:
        """Write a training checkpoint with the state of `save_last`, in addition to others.

        Args:
            name: its name; None means one with the number of the step, which replaces the same one.

        Raises:
            InvalidRequest: the name is in use, or the model accepts no requests.
        """
        self._check_alive()
        if name is not None:
            path = CheckpointPath(self._name, CheckpointKind.TRAINING, name)
            await self.checkpoints.begin(path, None)
        point = self.schedule.begin(time.monotonic())
        written = await self.checkpoints.write_state(
            await self.engine.export_state(),
            lambda step: name or f"saved-step-{step:06d}",
            overwrite=name is None,
        )
        self.schedule.saved(point)
        return written

    async def autosave(self) -> None:
        """Write a checkpoint with the state of `save_last`, and delete all but the latest two."""
        point = self.schedule.begin(time.monotonic())
        await self.checkpoints.write_autosave(await self.engine.export_state())
        self.schedule.saved(point)

    def _count_change(self) -> None:
        self.schedule.changed(time.monotonic())
        self.on_change()

    @property
    def steps(self) -> int:
        """Number of optimizer steps that the model has taken."""
        return self._steps

    @property
    def refused(self) -> str | None:
        """Why the model accepts no requests; None if it accepts them."""
        return self._refused

    async def restore(self, state: TrainingState) -> None:
        """Create the model from an exported state, without a gradient.

        Raises:
            InvalidRequest: the state does not match the model's configuration.
        """
        trainer = self._backend.trainer

        def restore() -> None:
            trainer.add_model(self._name, self._spec.lora)
            trainer.import_state(self._name, state)

        await self.engine.run(restore)
        self._steps = state.step
        self._refused = None

    def refuse(self, reason: str) -> None:
        """Accept no requests from now on, with this reason."""
        self._refused = reason

    async def drop_gradient(self) -> None:
        """Drop the accumulated gradient."""
        self.curve.drop_passes()
        self.engine.gradient_lost = None
        if self._refused is None:
            await self.engine.run_lightweight(
                lambda: self._backend.trainer.discard_gradient(self._name)
            )

    async def delete(self) -> None:
        """Free the model's memory."""
        self._refused = "the model was deleted"
        self._backend.curves.depart(self._name, self.curve)
        await self.engine.remove()
        await self._samplers.retire_model(self._model_id)

    def _engine_lost(self) -> str | None:
        """Save nothing more of a model that the engine has lost; return what to resume from."""
        self.schedule.end()
        return self.checkpoints.to_resume_from()

    def _check_alive(self) -> None:
        if self._refused is not None:
            raise InvalidRequest(f"model {self._name}: {self._refused}")

    async def _import_first(self, saved: SavedModel) -> None:
        """Import a checkpoint into a new model; free the model's memory if that fails."""
        try:
            await self._import(saved)
        except Exception:
            await self.engine.remove()
            raise

    async def _import(self, saved: SavedModel) -> None:
        self.num_changes += 1
        await self.engine.run(lambda: self._backend.trainer.import_state(self._name, saved.state))
        self._steps = saved.state.step
        self.engine.gradient_lost = None
        self.curve.drop_passes()
        if saved.gradient is not None:
            await self.engine.restore_gradient(saved.gradient)


def _check_supported(spec: ModelSpec, max_lora_rank: int) -> None:
    if spec.optimizer.type != "adamw":
        raise InvalidRequest(
            f"optimizer_config.type: {spec.optimizer.type!r} is not supported; use 'adamw' (the"
            " others have no public definition)"
        )
    if spec.lora is not None and spec.lora.rank > max_lora_rank:
        raise InvalidRequest(
            f"lora_config.rank: must be at most {max_lora_rank} (limits.max_lora_rank), got"
            f" {spec.lora.rank}"
        )


def _seed_of(lora: LoraConfig) -> int:
    return random_seed() if lora.seed is None else lora.seed


def _do_nothing() -> None:
    """Stands for a callback until there is one."""


async def _saved_result(uploading: asyncio.Task[CheckpointManifest]) -> Result:
    """Wait for a checkpoint; return the result of the request that saves it."""
    return _saved(await uploading)


def _saved(written: CheckpointManifest) -> Result:
    answer: dict[str, object] = {"path": written.tinker_path}
    if written.path.kind is CheckpointKind.EXTERNAL:
        answer["size_bytes"] = written.size_bytes
    return future_responses.finished(answer)
