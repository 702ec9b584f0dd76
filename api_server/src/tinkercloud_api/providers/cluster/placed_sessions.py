"""Finds the TrainingSessions that serve runs and samplers, among those of an informer's copy."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from pydantic import ValidationError

from tinkercloud_api.providers.base import Placement
from tinkercloud_api.providers.cluster import session_spec
from tinkercloud_api.providers.cluster.cluster_errors import wire_error
from tinkercloud_api.providers.cluster.session_status import (
    Ended,
    Readiness,
    Ready,
    TrainingSessionView,
    read_session,
    readiness,
)
from tinkercloud_crds.training_session import SERVING_ROLES
from tinkercloud_kube import errors
from tinkercloud_kube.client import Client, ObjectRef
from tinkercloud_kube.informer import Informer
from tinkercloud_protocol.wire.errors import StateLost, Unavailable
from tinkercloud_protocol.wire.json_model import describe


@dataclass(frozen=True, slots=True)
class PlacedSessions:
    """The sessions of placements. Belongs to one event loop."""

    api: Client
    sessions: Informer[TrainingSessionView]
    _samplers: dict[tuple[str, str], str] = field(default_factory=dict)
    """TrainingSession that serves the samplers of an owner and base model. It is used for as long
    as it is ready, because its head holds the results of sampling requests."""

    def serving(self, session: TrainingSessionView) -> tuple[TrainingSessionView, Readiness]:
        """Return the session whose pods serve a session, and the readiness.

        A session without pods of its own is served by its pool cluster. Endpoints belong to the
        cluster and its head's process, so one of an earlier cluster or process is never used.
        """
        cluster = self.cluster_of(session)
        return cluster or session, readiness(session, cluster)

    def cluster_of(self, session: TrainingSessionView | None) -> TrainingSessionView | None:
        """Return the pool cluster that serves a session, if it has one that exists."""
        name = session.spec.pool_cluster if session is not None else None
        cluster = self.sessions.get(name) if name is not None else None
        is_pool = cluster is not None and cluster.spec.role in SERVING_ROLES
        return cluster if is_pool else None

    def find(self, placement: Placement) -> TrainingSessionView | None:
        """Return the session of a placement, which may belong to another one by its name."""
        if placement.model is None:
            return self._session_of_samplers(placement)
        return self.sessions.get(name_of(placement))

    def _session_of_samplers(self, placement: Placement) -> TrainingSessionView | None:
        """Return the session that was used before if it is ready, else the oldest ready one."""
        key = (placement.owner, placement.base_model)
        chosen = self.sessions.get(self._samplers.get(key, ""))
        if chosen is not None and self._is_ready(chosen):
            return chosen
        serving = [
            session
            for session in self.sessions.objects()
            if (session.spec.owner, session.spec.base_model) == key
            and session.spec.role not in SERVING_ROLES
            and self._is_ready(session)
        ]
        if not serving:
            return self.sessions.get(name_of(placement))
        oldest = min(serving, key=lambda session: (session.created_at, session.name))
        self._samplers[key] = oldest.name
        return oldest

    def _is_ready(self, session: TrainingSessionView) -> bool:
        return isinstance(self.serving(session)[1], Ready)

    async def confirmed(self, placement: Placement) -> TrainingSessionView | None:
        """Return a run's session; if it is not known, read it from Kubernetes.

        Raises:
            Unavailable: as for `read`.
        """
        session = self.sessions.get(name_of(placement)) or await self.read(name_of(placement))
        return session if session is not None and belongs(session, placement) else None

    async def read(self, name: str) -> TrainingSessionView | None:
        """Read a session from Kubernetes.

        Raises:
            Unavailable: Kubernetes does not respond, or the session cannot be read.
        """
        try:
            manifest = await self.api.find(ObjectRef("TrainingSession", name))
        except errors.KubernetesError as error:
            raise Unavailable(wire_error(error).message) from None
        try:
            return read_session(manifest) if manifest is not None else None
        except ValidationError as error:
            raise Unavailable(
                f"TrainingSession {name} cannot be read by this version of the server:"
                f" {describe(error)}"
            ) from None

    async def changed(
        self, name: str, session: TrainingSessionView | None, cluster: TrainingSessionView | None
    ) -> None:
        """Wait until a session, or the pool cluster that serves it, differs from what it was."""
        waiting = [asyncio.create_task(self.sessions.changed(name, session))]
        if cluster is not None:
            changed = self.sessions.changed(cluster.name, cluster)
            waiting.append(asyncio.create_task(changed))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def remove_ended(
        self, placement: Placement, session: TrainingSessionView, state: Ended
    ) -> None:
        """Delete an ended session that never ran, or that can be replaced (samplers).

        A session that was reported to its client as failed must not start later.

        Raises:
            WireError: why it has ended, unless it can be replaced.
            KubernetesError: it could not be deleted.
        """
        if not isinstance(state.error, StateLost):
            is_declared = placement.options.session is not None
            if not (is_declared or session.is_deleted or session.incarnation is not None):
                await self.delete(session)
            raise state.error
        if placement.model is not None:
            raise state.error
        if not session.is_deleted:
            await self.delete(session)

    async def delete(self, session: TrainingSessionView) -> None:
        """Delete a session, unless a newer one has its name by now.

        Raises:
            KubernetesError: it could not be deleted.
        """
        with suppress(errors.Conflict):
            await self.api.delete(ObjectRef("TrainingSession", session.name), session.uid)


def name_of(placement: Placement, session: TrainingSessionView | None = None) -> str:
    """Return the name of a placement's session, if it is known, or that which it would have."""
    if session is not None:
        return session.name
    return placement.options.session or session_spec.session_name(placement)


def belongs(session: TrainingSessionView, placement: Placement) -> bool:
    """Whether a session found by its name may serve a placement."""
    if placement.options.session is not None:
        return session.spec.owner == placement.owner
    return session_spec.is_of(session, placement)
