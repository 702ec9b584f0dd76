"""Creates training runs, and releases the resources of sessions that have ended."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.catalog.schema.tables import EXPIRED, Session, TrainingRun, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.providers.base import (
    Placement,
    ServedModel,
    SessionProvider,
    unknown_base_model,
)
from tinkercloud_api.providers.model_names import is_of, model_of
from tinkercloud_api.providers.session_options import SessionOptions, collect_options
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.training_requests import (
    CreateModelRequest,
    LoadWeightsRequest,
    OptimizerConfig,
)
from tinkercloud_protocol.wire.bounds import MAX_BATCH_SIZE
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.ids import ModelId, RequestId
from tinkercloud_protocol.wire.paths import CheckpointPath

log = structlog.get_logger(__name__)


async def _nothing_to_stop(_run_ids: Collection[str]) -> None:
    """Stop nothing: no program trains these runs."""


@dataclass(frozen=True, slots=True)
class Created:
    """The request that creates a run."""

    request_id: str
    is_new: bool
    """False if the run existed already, created by the same request."""


@dataclass(frozen=True, slots=True)
class TrainingRuns:
    """Operations on training runs that do not need a head."""

    catalog: Catalog
    provider: SessionProvider
    checkpoints: Checkpoints
    locator: HeadLocator
    stop_programs: Callable[[Collection[str]], Awaitable[None]] = _nothing_to_stop
    """Stops the programs that train runs, before these are deleted."""

    async def create(
        self, request: CreateModelRequest, model_id: ModelId, principal: Principal
    ) -> "Created":
        """Create a run from a base model.

        Raises:
            NotFound: the session does not exist for this principal.
            InvalidRequest: the base model is not served, the rank is too high, the client announces
                more than the server accepts, or the id is already used by another run.
        """
        base_model = self.served_for(request).name
        spec = ModelSpec(
            owner=principal.owner, lora=request.lora_config, optimizer=request.optimizer_config
        )
        return await self._create(model_id, base_model, spec, request.user_metadata, principal)

    async def create_from_checkpoint(
        self, request: LoadWeightsRequest, principal: Principal, reader: Principal
    ) -> str:
        """Create a run from a checkpoint and return the request id of its creation.

        Args:
            request: the request.
            principal: the caller, who becomes the owner of the run.
            reader: whose access to the checkpoint counts.

        Raises:
            NotFound: the session or the checkpoint does not exist for this principal.
            InvalidRequest: the base model differs or is not served, the rank of the adapter is too
                high, or the id is already used.
        """
        path = CheckpointPath.parse(request.path)
        path.require_loadable()
        manifest = await self.checkpoints.manifest(path, reader)
        requested = request.base_model
        if requested is not None and not is_of(
            requested, manifest.base_model, self.provider.models()
        ):
            raise InvalidRequest(
                f"base_model: {path} was trained on {manifest.base_model!r} and cannot be loaded"
                f" into {requested!r}"
            )
        if request.optimizer and request.optimizer_config not in {None, manifest.optimizer}:
            raise InvalidRequest(
                f"optimizer_config: got {request.optimizer_config.type!r}, but {path} contains"
                f" the optimizer state of {manifest.optimizer.type!r}, which this call restores"
                " (optimizer is true); omit optimizer_config, or load without the optimizer"
            )
        _check_rank(manifest.lora, self.served(manifest.base_model), f"the adapter of {path}")
        optimizer = request.optimizer_config or OptimizerConfig()
        spec = ModelSpec(
            owner=principal.owner,
            lora=manifest.lora,
            optimizer=manifest.optimizer if request.optimizer else optimizer,
            restore_from=str(path),
            restore_optimizer=request.optimizer,
        )
        model_id = ModelId(request.session_id or "", request.model_seq_id or 0)
        created = await self._create(
            model_id, manifest.base_model, spec, request.user_metadata, principal
        )
        return created.request_id

    async def _create(
        self,
        model_id: ModelId,
        base_model: str,
        spec: ModelSpec,
        user_metadata: dict[str, str] | None,
        principal: Principal,
    ) -> "Created":
        session = await self.active_session(model_id.session_id, principal)
        metadata = (user_metadata or {}) | collect_options(
            session.tags, session.user_metadata, user_metadata
        )
        options = SessionOptions.read(metadata)
        wanted = Placement(str(model_id), principal.owner, base_model, spec, options)
        admitted = await self.provider.admit(wanted)
        if admitted.restore_from not in {None, spec.restore_from}:
            path = CheckpointPath.parse(admitted.restore_from)
            await self.checkpoints.manifest(path, principal)
        content = admitted.model_dump(mode="json", exclude_defaults=True)
        new = TrainingRun(
            id=str(model_id),
            session_id=model_id.session_id,
            owner=principal.owner,
            base_model=base_model,
            spec=content,
            user_metadata=metadata or None,
            keeps_samples_since=now() if options.keep_samples else None,
        )
        row = await self.catalog.add_run(new)
        if (row.base_model, row.spec) != (base_model, content):
            raise InvalidRequest(
                f"model_seq_id: {model_id.index} was already used in this session for another"
                " model; use the next unused number"
            )
        principal.named_objects.add(row.id)
        self.locator.start_placing(row)
        return Created(str(RequestId(model_id, 0)), row is new)

    async def active_session(self, session_id: str, principal: Principal) -> Session:
        """Return a session that exists for this principal and has not ended.

        Raises:
            NotFound: it does not exist for this principal.
            InvalidRequest: it has ended.
        """
        session = principal.require(
            await self.catalog.session(session_id), f"session {session_id!r}"
        )
        if session.finished_at is not None:
            is_expired = session.finish_reason == EXPIRED
            why = session.finish_detail if is_expired else session.finish_reason
            raise InvalidRequest(
                f"session {session_id!r} has ended ({why}); create a new ServiceClient"
            )
        return session

    def served_for(self, request: CreateModelRequest) -> ServedModel:
        """Return the base model of a new run.

        Raises:
            InvalidRequest: it is not served, the rank of the adapter is too high, or the client
                announces more than the server accepts.
        """
        served = self.served(request.base_model)
        _check_rank(request.lora_config, served, "lora_config.rank")
        _check_sizes(request, served)
        return served

    def served(self, name: str) -> ServedModel:
        """Return the served base model that a client's name refers to.

        Raises:
            InvalidRequest: it is not served; the message lists the served base models.
        """
        models = self.provider.models()
        model = model_of(name, models)
        if model is None:
            raise InvalidRequest(unknown_base_model(name, models))
        return model

    async def unload(self, run_id: str, stopped_by: str | None = None) -> None:
        """Delete a run and free its resources, but keep its checkpoints. This is idempotent.

        Args:
            run_id: the run.
            stopped_by: who stopped it, as `TrainingRun.stopped_by`.
        """
        await self.stop_programs([run_id])
        await self.catalog.delete_run(run_id, stopped_by)
        if (row := await self.catalog.run(run_id)) is not None:
            samplers = await self.catalog.samplers_of_session(row.session_id)
            own = [sampler for sampler in samplers if sampler.run_id == run_id]
            await self.locator.deleted.release([row], own)

    async def expire_sessions(self, moment: datetime, days: float) -> None:
        """End the sessions whose clients have been inactive for a number of days."""
        detail = f"its client was inactive for {days:g} days (session_expiry_days)"
        for session_id in await self.catalog.expired_sessions(moment - timedelta(days=days)):
            log.warning("session expired", session_id=session_id, days=days)
            await self.finish_session(session_id, EXPIRED, detail)

    async def finish_session(self, session_id: str, reason: str, detail: str | None) -> None:
        """End a session and free its resources. This is idempotent."""
        runs = await self.catalog.runs_of_session(session_id)
        await self.stop_programs([run.id for run in runs])
        await self.catalog.finish_session(session_id, reason, detail)
        runs = await self.catalog.runs_of_session(session_id)
        samplers = await self.catalog.samplers_of_session(session_id)
        await self.locator.deleted.release(runs, samplers)


def _check_rank(lora: LoraConfig | None, served: ServedModel, source: str) -> None:
    """Check the rank of a new run's adapter, which `source` gives.

    Raises:
        InvalidRequest: it is too high.
    """
    most = served.max_lora_rank
    if lora is not None and most is not None and lora.rank > most:
        raise InvalidRequest(
            f"{source}: got rank {lora.rank}, but {served.name!r} accepts at most {most}; use a"
            " lower rank, or raise limits.max_lora_rank of the server"
        )


def _check_sizes(request: CreateModelRequest, served: ServedModel) -> None:
    """Check that the server accepts the requests that a client announces.

    Raises:
        InvalidRequest: it does not.
    """
    bounds = [
        ("max_seq_len", request.max_seq_len, served.max_context_length, "tokens per sequence"),
        ("max_batch_size", request.max_batch_size, MAX_BATCH_SIZE, "datums per request"),
    ]
    for name, wanted, most, unit in bounds:
        if wanted is not None and wanted > most:
            raise InvalidRequest(
                f"{name}: got {wanted}, but {served.name!r} accepts at most {most} {unit}; send at"
                f" most that, or omit {name}"
            )
