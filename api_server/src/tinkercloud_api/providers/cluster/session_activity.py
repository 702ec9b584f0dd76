"""Records the last use of sessions for the operator in an annotation, at most once a minute each.

The annotation itself shows when a replica last wrote it, so several replicas do not write more
often.
"""

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta

import structlog

from tinkercloud_api.providers.cluster.session_status import TrainingSessionView, idle_since
from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_kube.client import Client, ObjectRef
from tinkercloud_kube.errors import KubernetesError, NotFound

log = structlog.get_logger(__name__)

_SHORTEST = timedelta(seconds=labels.LAST_ACTIVITY_SECONDS)
_SPREAD_SECONDS = 10.0
"""Random delay, so that one replica writes first and the others see its annotation."""
_AFTER_FAILURE_SECONDS = 5.0


class ActivityAnnotator:
    """Writes the last-activity annotation. Belongs to one event loop."""

    def __init__(self, api: Client) -> None:
        self._api = api
        self._not_before: dict[str, float] = {}
        """Monotonic time before which this process does not annotate a session again."""
        self._writes: dict[str, asyncio.Task[None]] = {}

    def touch(self, session: TrainingSessionView) -> None:
        """Record that a session is in use; annotate it if the annotation is older than a minute."""
        if time.monotonic() < self._not_before.get(session.name, 0) or session.is_deleted:
            return
        moment = datetime.now(UTC)
        recorded = session.last_activity
        if recorded is not None and moment - recorded < _SHORTEST:
            spread = random.uniform(0, _SPREAD_SECONDS)  # noqa: S311 - guards nothing
            rest = (recorded + _SHORTEST - moment).total_seconds() + spread
            self._not_before[session.name] = time.monotonic() + rest
            return
        self._begin(session.name, moment)

    def wake(self, session: TrainingSessionView) -> None:
        """Annotate a session that was suspended for idleness, so that the operator resumes it."""
        idle = idle_since(session)
        recorded = session.last_activity
        if idle is not None and (recorded is None or recorded <= idle):
            self._begin(session.name, max(datetime.now(UTC), idle + timedelta(seconds=1)))

    def _begin(self, name: str, moment: datetime) -> None:
        if name in self._writes:
            return
        self._not_before[name] = time.monotonic() + _SHORTEST.total_seconds()
        task = self._writes[name] = asyncio.create_task(self._write(name, moment))
        task.add_done_callback(lambda _: self._writes.pop(name, None))

    async def _write(self, name: str, moment: datetime) -> None:
        stamp = {labels.LAST_ACTIVITY: timestamp(moment)}
        try:
            ref = ObjectRef("TrainingSession", name)
            await self._api.merge(ref, {"metadata": {"annotations": stamp}})
        except NotFound:
            return
        except KubernetesError as error:
            self._not_before[name] = time.monotonic() + _AFTER_FAILURE_SECONDS
            log.warning(
                "cannot annotate a session with its last activity", session=name, error=str(error)
            )

    def forget(self, name: str) -> None:
        """Drop the state of a deleted session."""
        self._not_before.pop(name, None)

    async def stop(self) -> None:
        """Wait for the writes in progress."""
        await asyncio.gather(*self._writes.values())
