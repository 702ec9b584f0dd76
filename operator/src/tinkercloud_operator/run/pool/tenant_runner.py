"""Maintains the status of Tenants: what the sessions of their owners use."""

from datetime import UTC, datetime

import structlog
from pydantic import ValidationError

from tinkercloud_crds.quota_fields import Tenant
from tinkercloud_crds.tenant import TenantSpec
from tinkercloud_kube.errors import KubernetesError
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.tenancy.tenant_status import tenant_status
from tinkercloud_operator.run.cluster.executor import Executor
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.run.cluster.work_queue import WorkQueue

log = structlog.get_logger(__name__)

_GATHER_SECONDS = 1.0
"""Time during which changes of sessions are collected before a status is written."""


class Tenants:
    """The Tenants during one term of leadership. Belongs to one event loop."""

    def __init__(self, watched: Watched, executor: Executor) -> None:
        self._watched = watched
        self._executor = executor
        self._queue = WorkQueue()
        """Tenants whose status may have changed."""

    def note(self, kind: str, manifest: Manifest) -> None:
        """Record a changed object: a Tenant, a session, or the RayCluster of one."""
        if kind == "Tenant":
            # An owner may belong to another Tenant now.
            self.enqueue_all()
            return
        name = manifest["metadata"]["name"]
        session = manifest if kind == "TrainingSession" else self._watched.sessions.get(name)
        if kind in {"TrainingSession", "RayCluster"} and session is not None:
            tenant = self._watched.quotas.tenant(str(session["spec"].get("owner", "")))
            if tenant is not None:
                self._queue.add_after(tenant.name, _GATHER_SECONDS)

    def enqueue_all(self) -> None:
        """Enqueue every Tenant."""
        for name in self._watched.tenants:
            self._queue.add(name)

    async def work(self) -> None:
        """Write changed statuses, forever."""
        while True:
            name = await self._queue.take()
            try:
                await self._update_status(name)
            except KubernetesError as error:
                log.warning("could not update a Tenant; retrying", tenant=name, error=str(error))
                self._queue.failed(name)
            except Exception:
                log.exception("updating a Tenant failed unexpectedly; retrying", tenant=name)
                self._queue.failed(name)
            else:
                self._queue.done(name)

    async def _update_status(self, name: str) -> None:
        manifest = self._watched.tenants.get(name)
        if manifest is None:
            return
        try:
            spec = TenantSpec.model_validate(manifest["spec"])
        except ValidationError as error:
            log.warning("this version cannot read the Tenant", tenant=name, error=str(error))
            return
        claimants = self._watched.quotas.claimants(Tenant(name, spec))
        status = tenant_status(manifest, spec, claimants, datetime.now(UTC))
        written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        content = self._executor.storable("Tenant", written)
        if content != manifest.get("status"):
            await self._executor.write_status("Tenant", name, manifest["metadata"]["uid"], content)
