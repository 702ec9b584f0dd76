"""Maintains the status of BaseModels: whether each is active, and what its sessions use."""

from datetime import UTC, datetime

import structlog

from tinkercloud_kube.errors import KubernetesError
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.pool.base_model_status import after_a_gap, base_model_status
from tinkercloud_operator.decide.pool.slots_plan import pool_status
from tinkercloud_operator.decide.pool.spare_clusters import spares_status
from tinkercloud_operator.run.cluster.executor import Executor
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.run.cluster.work_queue import WorkQueue
from tinkercloud_operator.run.pool.pool_runner import Pools
from tinkercloud_operator.run.pool.spare_runner import Spares

log = structlog.get_logger(__name__)

_GATHER_SECONDS = 2.0
"""Time during which changes of sessions are collected before a status is written."""


class BaseModels:
    """The BaseModels during one term of leadership. Belongs to one event loop."""

    def __init__(self, watched: Watched, executor: Executor, pools: Pools, spares: Spares) -> None:
        self._watched = watched
        self._executor = executor
        self._pools = pools
        self._spares = spares
        self._queue = WorkQueue()
        """BaseModels whose status may have changed."""
        self._known: set[str] = set()
        """BaseModels whose idle GPUs have been followed since this object was created."""

    def note(self, kind: str, manifest: Manifest) -> None:
        """Record a changed object: a BaseModel, or a session of one."""
        if kind == "BaseModel":
            # Another BaseModel with the same modelName may become the active one.
            self.enqueue_all()
        elif kind == "TrainingSession":
            active = self._watched.offering(manifest["spec"].get("baseModel", ""))
            if active is not None:
                self._queue.add_after(active["metadata"]["name"], _GATHER_SECONDS)

    def enqueue_all(self) -> None:
        """Enqueue every BaseModel."""
        for name in self._watched.base_models:
            self._queue.add(name)

    async def work(self) -> None:
        """Write changed statuses, forever."""
        while True:
            name = await self._queue.take()
            try:
                await self._update_status(name)
            except KubernetesError as error:
                log.warning(
                    "could not update the status of the BaseModel; retrying",
                    base_model=name,
                    error=str(error),
                )
                self._queue.failed(name)
            except Exception:
                log.exception(
                    "updating the status of the BaseModel failed unexpectedly; retrying",
                    base_model=name,
                )
                self._queue.failed(name)
            else:
                self._queue.done(name)

    async def _update_status(self, name: str) -> None:
        base_model = self._watched.base_models.get(name)
        if base_model is None:
            return
        model_name = base_model["spec"].get("modelName", "")
        active = self._watched.offering(model_name)
        sessions = self._watched.sessions_of(model_name)
        pool = pool_status(self._pools.facts(model_name))
        spares = spares_status(self._spares.facts(model_name))
        known = base_model if name in self._known else after_a_gap(base_model, sessions)
        status = base_model_status(
            known, active, sessions, datetime.now(UTC), pool=pool, spares=spares
        )
        written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        content = self._executor.storable("BaseModel", written)
        if content != base_model.get("status"):
            uid = base_model["metadata"]["uid"]
            await self._executor.write_status("BaseModel", name, uid, content)
        self._known.add(name)
