"""Session heads as pods: creates a TrainingSession per run, for which the operator runs the pods.

All state here can be restored from the resource, the catalog and the session's Secret, so any
replica can serve any request. The provider creates and annotates the resource and reads it from an
informer's copy; the status is written by the operator alone.

A run is served by its own session, or by a session declared in Git to which its client attached.
Samplers of a base model or of a saved checkpoint are served by a running session of the same owner
and base model, or else by a session that all such samplers of the owner share. If the BaseModel has
a pool, the pods are those of a pool cluster, on which the operator gives the session a place.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog

from tinkercloud_api.providers.base import (
    FailingCondition,
    HeadEnd,
    HeadEndpoint,
    HeadFailed,
    Pending,
    Placement,
    RecordReport,
    ServedModel,
    SessionProvider,
    unknown_base_model,
)
from tinkercloud_api.providers.cluster import session_spec
from tinkercloud_api.providers.cluster.cluster_errors import wire_error
from tinkercloud_api.providers.cluster.failing_conditions import failing_conditions
from tinkercloud_api.providers.cluster.head_endpoints import HeadEndpoints, HeadUnresponsive
from tinkercloud_api.providers.cluster.placed_sessions import PlacedSessions, belongs, name_of
from tinkercloud_api.providers.cluster.pool_use import gpu_use, pools_in_use
from tinkercloud_api.providers.cluster.session_activity import ActivityAnnotator
from tinkercloud_api.providers.cluster.session_durability import DurabilityAnnotator
from tinkercloud_api.providers.cluster.session_status import (
    BaseModelView,
    Ended,
    Ready,
    TrainingSessionView,
    head_end,
    read_base_model,
    read_session,
    readable,
    readiness,
)
from tinkercloud_api.providers.cluster.tenant_watch import KnownTenants
from tinkercloud_api.providers.head_http_client import open_client
from tinkercloud_api.providers.model_names import with_aliases
from tinkercloud_api.providers.served_models import served_model
from tinkercloud_crds import labels
from tinkercloud_crds.quota_fields import Tenant
from tinkercloud_crds.tenant import TenantUsage
from tinkercloud_kube import errors
from tinkercloud_kube.client import Client
from tinkercloud_kube.informer import Informer, pause_seconds
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.responses.listings import GpuUse, PoolUse
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, StateLost, Unavailable

log = structlog.get_logger(__name__)


class KubernetesProvider(SessionProvider):
    """Session heads in pods."""

    def __init__(
        self,
        namespace: str,
        models_dir: Path | None,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Create a provider; `start` connects it.

        Args:
            namespace: namespace of the resources.
            models_dir: folder with the mounted volumes of models, each under its claim's name.
            aliases: names of base models by alias; those that are not served have no effect.
        """
        self._aliases = aliases
        self._namespace = namespace
        self._models_dir = models_dir
        self._last_errors: dict[str, str] = {}
        """Error of the last failed step of `acquire`, by name of the TrainingSession."""
        self._watching: list[asyncio.Task[None]] = []

    async def start(self, record_report: RecordReport) -> None:
        """See `SessionProvider.start`. Returns when all objects have been listed."""
        self._api = await Client.connect(self._namespace, labels.API_FIELD_MANAGER)
        self._client = open_client()
        self._sessions = Informer(
            self._api, "TrainingSession", readable(read_session), self._forget
        )
        self._base_models = Informer(self._api, "BaseModel", readable(read_base_model))
        self._placed = PlacedSessions(self._api, self._sessions)
        self._durability = DurabilityAnnotator(self._api, self._sessions.objects)
        self._endpoints = HeadEndpoints(self._api, self._client, record_report, self._durability)
        self._activity_annotator = ActivityAnnotator(self._api)
        self._tenants = KnownTenants(self._api)
        watches = self.watches().items()
        self._watching += [asyncio.create_task(run(), name=name) for name, run in watches]
        log.info("waiting for the Kubernetes API", namespace=self._namespace)
        try:
            await self._sessions.is_filled.wait()
            await self._base_models.is_filled.wait()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """See `SessionProvider.stop`. Sessions keep running for other replicas and processes."""
        for step in self.shutdown_steps():
            await step()

    def watches(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what runs as long as the provider, by name of its task."""
        return {
            "watch sessions": self._sessions.run,
            "watch base models": self._base_models.run,
            "watch tenants": self._tenants.run,
        }

    def shutdown_steps(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return the steps of `stop`, in order."""
        connections = (self._client.close, self._api.close)
        writers = (self._activity_annotator.stop, self._durability.stop)
        return (self._end_watches, *writers, self._endpoints.stop, *connections)

    async def _end_watches(self) -> None:
        for task in self._watching:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    @property
    def api(self) -> Client:
        """The connection to Kubernetes."""
        return self._api

    @property
    def sessions(self) -> Informer[TrainingSessionView]:
        """All TrainingSessions."""
        return self._sessions

    def models(self) -> list[ServedModel]:
        """See `SessionProvider.models`."""
        offered = {model.spec.model_name: model for model in self._offered()}
        served = [
            served_model(model.spec, self._models_dir) for _, model in sorted(offered.items())
        ]
        return with_aliases(served, self._aliases)

    def _offered(self) -> list[BaseModelView]:
        """Return the offered BaseModels in descending order of name.

        If two offer the same model name, the last one, with the smaller object name, is used.
        """
        ordered = sorted(self._base_models.objects(), key=lambda model: model.name, reverse=True)
        return [model for model in ordered if model.is_offered]

    def base_model(self, name: str) -> BaseModelView | None:
        """Return the offered BaseModel of a model name, if there is one."""
        found = [model for model in self._offered() if model.spec.model_name == name]
        return found[-1] if found else None

    def failing_conditions(self) -> list[FailingCondition]:
        """See `SessionProvider.failing_conditions`."""
        return list(failing_conditions(self._sessions.objects(), self._base_models.objects()))

    def pools(self) -> Mapping[str, PoolUse]:
        """See `SessionProvider.pools`."""
        return pools_in_use(self._offered(), self._sessions.objects(), datetime.now(UTC))

    def gpus_of(self, model: ServedModel) -> GpuUse | None:
        """See `SessionProvider.gpus_of`."""
        found = self.base_model(model.name)
        return gpu_use(found, datetime.now(UTC)) if found is not None else None

    def tenants(self) -> Sequence[Tenant]:
        """See `SessionProvider.tenants`."""
        return self._tenants.all()

    async def tenant_usage(self, tenant: Tenant) -> TenantUsage:
        """Return what a tenant uses of its limits, as the operator has last written it."""
        return self._tenants.usage(tenant.name)

    async def admit(self, placement: Placement) -> ModelSpec:
        """See `SessionProvider.admit`."""
        assert placement.model is not None  # noqa: S101 - only runs are admitted
        if placement.options.session is not None:
            return session_spec.attached_model(placement, await self._placed.confirmed(placement))
        base_model = self.base_model(placement.base_model)
        if base_model is None:
            raise InvalidRequest(unknown_base_model(placement.base_model, self.models()))
        session_spec.check_options(placement, base_model)
        session_spec.training_session(placement, base_model, datetime.now(UTC))
        return placement.model

    def find(self, placement: Placement) -> HeadEndpoint | None:
        """See `SessionProvider.find`."""
        session = self._placed.find(placement)
        if session is None or not belongs(session, placement):
            return None
        serving, state = self._placed.serving(session)
        for used in {session.name: session, serving.name: serving}.values():
            self._activity_annotator.touch(used)
        return self._endpoints.cached(serving, state) if isinstance(state, Ready) else None

    async def acquire(self, placement: Placement) -> HeadEndpoint:
        """See `SessionProvider.acquire`. Each iteration is one step towards a ready session."""
        failures = 0
        while True:
            session = self._placed.find(placement)
            name = name_of(placement, session)
            cluster = self._placed.cluster_of(session)
            try:
                endpoint = await self._step(placement, session)
            except (errors.Unavailable, errors.Conflict, HeadUnresponsive) as error:
                failures += 1
                self._last_errors[name] = str(error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_seconds(failures)):
                        await self._placed.changed(name, session, cluster)
                continue
            except errors.KubernetesError as error:
                raise wire_error(error) from None
            except Unavailable as error:
                # Polls for results report it as what they wait for.
                self._last_errors[name] = error.message
                raise
            self._last_errors.pop(name, None)
            if endpoint is not None:
                return endpoint
            failures = 0
            await self._placed.changed(name, session, cluster)

    async def changed(self, placement: Placement) -> None:
        """See `SessionProvider.changed`."""
        session = self._placed.find(placement)
        name = name_of(placement, session)
        await self._placed.changed(name, session, self._placed.cluster_of(session))

    async def confirm(self, placement: Placement) -> None:
        """See `SessionProvider.confirm`: a run in a pool may have been moved meanwhile."""
        known, now = self._placed.find(placement), await self._placed.read(name_of(placement))
        if known is None or now is None:
            return
        if (known.spec.pool_cluster, known.moving_to) != (now.spec.pool_cluster, now.moving_to):
            raise Unavailable(
                f"TrainingSession {known.name} is being moved to another pool cluster; send the"
                " request again"
            )

    async def _step(
        self, placement: Placement, session: TrainingSessionView | None
    ) -> HeadEndpoint | None:
        """Perform the next step for a session; return its endpoint if it is ready."""
        if session is None:
            await self._create(placement)
            return None
        if not belongs(session, placement):
            raise HeadFailed(
                f"TrainingSession {session.name} already belongs to {session.spec.model_id!r},"
                f" whose name collides with that of {placement.target!r}; create another run"
            )
        serving, state = self._placed.serving(session)
        if isinstance(state, Ready):
            self._activity_annotator.touch(session)
            return await self._endpoints.resolve(serving, state)
        if isinstance(state, Ended):
            await self._placed.remove_ended(placement, session, state)
            return None
        self._activity_annotator.wake(session)
        return None

    async def _create(self, placement: Placement) -> None:
        if placement.options.session is not None:
            raise StateLost(f"TrainingSession {placement.options.session} no longer exists")
        base_model = self.base_model(placement.base_model)
        if base_model is None:
            raise NotFound(unknown_base_model(placement.base_model, self.models()))
        manifest = session_spec.training_session(placement, base_model, datetime.now(UTC))
        with suppress(errors.AlreadyExists):
            await self._api.create(manifest, is_strict=True)
        log.info("TrainingSession created", session=name_of(placement), target=placement.target)

    def pending(self, placement: Placement) -> Pending:
        """See `SessionProvider.pending`."""
        session = self._placed.find(placement)
        error_message = self._last_errors.get(name_of(placement, session))
        if error_message is not None:
            return Pending("active", error_message)
        if session is None:
            return Pending("active", f"TrainingSession {name_of(placement)} is being created")
        state = self._placed.serving(session)[1]
        if isinstance(state, Pending):
            return state
        what = "has ended" if isinstance(state, Ended) else "is ready; connecting to its head"
        return Pending("active", f"TrainingSession {session.name} {what}")

    def shared_heads(self) -> list[HeadEndpoint]:
        """See `SessionProvider.shared_heads`: those of pool clusters that this process has used.

        The operator suspends idle sessions that have their own pods.
        """
        return list(self.clusters_of_heads())

    def heads_of(self, owner: str) -> list[HeadEndpoint]:
        """See `SessionProvider.heads_of`: those that this process has used."""
        own = [each for each in self._sessions.objects() if each.spec.owner == owner]
        heads = [
            self._endpoints.cached(session, state)
            for session in own
            if isinstance(state := readiness(session), Ready)
        ]
        return [*self.shared_heads(), *(head for head in heads if head is not None)]

    def placed_on(self, endpoint: HeadEndpoint) -> frozenset[str] | None:
        """See `SessionProvider.placed_on`."""
        name = self.clusters_of_heads().get(endpoint)
        return frozenset(run for run, cluster in self.clusters().items() if cluster == name)

    def clusters(self) -> Mapping[str, str]:
        """See `SessionProvider.clusters`."""
        found = {s.spec.model_id: s.spec.pool_cluster for s in self._sessions.objects()}
        return {run: cluster for run, cluster in found.items() if run and cluster}

    def clusters_of_heads(self) -> dict[HeadEndpoint, str]:
        """See `SessionProvider.clusters_of_heads`: those that this process has used."""
        clusters = [each for each in self._sessions.objects() if each.spec.role == "Pool"]
        heads = {
            self._endpoints.cached(cluster, state): cluster.name
            for cluster in clusters
            if isinstance(state := readiness(cluster), Ready)
        }
        return {endpoint: name for endpoint, name in heads.items() if endpoint is not None}

    def end_of(self, placement: Placement) -> HeadEnd | None:
        """See `SessionProvider.end_of`."""
        session = self._placed.find(placement)
        is_own = session is not None and belongs(session, placement)
        return head_end(session) if session is not None and is_own else None

    def runs(self) -> list[str]:
        """See `SessionProvider.runs`."""
        sessions = self._sessions.objects()
        return [s.spec.model_id for s in sessions if s.spec.model_id and not s.is_deleted]

    def has_own_head(self, placement: Placement) -> bool:
        """See `SessionProvider.has_own_head`."""
        session = self._placed.find(placement)
        return session is not None and session.spec.sharing == "Dedicated"

    def degraded(self) -> Mapping[str, str]:
        """See `SessionProvider.degraded`."""
        found = {s.spec.model_id: s.degraded for s in self._sessions.objects()}
        return {model: reason for model, reason in found.items() if model and reason}

    async def is_gone(self, placement: Placement) -> bool:
        """See `SessionProvider.is_gone`. Queries Kubernetes if the informer's copy may be stale."""
        session = await self._placed.confirmed(placement)
        if session is None:
            return True
        if session.is_deleted:
            # The error is to name the last checkpoint, which replaces the automatic ones.
            raise Unavailable(
                f"TrainingSession {session.name} is being deleted, and its head saves a last"
                " checkpoint; send the request again"
            )
        state = readiness(session)
        return isinstance(state, Ended) and isinstance(state.error, StateLost)

    def may_have_journals(self, placement: Placement) -> bool:
        """See `SessionProvider.may_have_journals`."""
        model = self.base_model(placement.base_model)
        return model is not None and model.spec.head.durability.level != "none"

    def invalidate(self, endpoint: HeadEndpoint) -> None:
        """See `SessionProvider.invalidate`."""
        self._endpoints.invalidate(endpoint)

    async def release(self, placement: Placement) -> None:
        """See `SessionProvider.release`: the operator saves a checkpoint and deletes the pods."""
        if placement.model is None or placement.options.session is not None:
            return
        session = await self._placed.confirmed(placement)
        if session is None:
            return
        try:
            await self._placed.delete(session)
        except errors.KubernetesError as error:
            raise Unavailable(wire_error(error).message) from None
        self._sessions.forget(session.name)

    def _forget(self, name: str) -> None:
        self._endpoints.forget(name)
        self._activity_annotator.forget(name)
        self._last_errors.pop(name, None)
