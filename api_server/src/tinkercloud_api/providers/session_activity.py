"""Tells the operator when sessions were last used: an annotation, at most once a minute each.

The annotation itself says when it was written last, by whichever replica, so replicas do not
multiply the writes.
"""

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta

import structlog

from tinkercloud_api.providers.cluster_api import ClusterApi, ClusterRefused, ClusterUnreachable
from tinkercloud_api.providers.session_status import TrainingSessionView, idle_since
from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp

log = structlog.get_logger(__name__)

_SHORTEST = timedelta(seconds=labels.LAST_ACTIVITY_SECONDS)
_SPREAD_SECONDS = 10.0
"""Replicas write at different moments, so that the first one's word keeps the others quiet."""
_AFTER_FAILURE_SECONDS = 5.0


class ActivityAnnotator:
    """Writes of the last-activity annotation. Belongs to one event loop."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._not_before: dict[str, float] = {}
        """Monotonic time before which a session is not written again by this process."""
        self._writes: dict[str, asyncio.Task[None]] = {}

    def touch(self, session: TrainingSessionView) -> None:
        """Note that a session is being used; write it if that has not been said for a minute."""
        if time.monotonic() < self._not_before.get(session.name, 0) or session.is_deleted:
            return
        moment = datetime.now(UTC)
        said = session.last_activity
        if said is not None and moment - said < _SHORTEST:
            spread = random.uniform(0, _SPREAD_SECONDS)  # noqa: S311 - guards nothing
            rest = (said + _SHORTEST - moment).total_seconds() + spread
            self._not_before[session.name] = time.monotonic() + rest
            return
        self._begin(session.name, moment)

    def wake(self, session: TrainingSessionView) -> None:
        """Say at once that a session suspended for idleness is wanted, unless that was said."""
        asleep = idle_since(session)
        said = session.last_activity
        if asleep is not None and (said is None or said <= asleep):
            self._begin(session.name, max(datetime.now(UTC), asleep + timedelta(seconds=1)))

    def _begin(self, name: str, moment: datetime) -> None:
        if name in self._writes:
            return
        self._not_before[name] = time.monotonic() + _SHORTEST.total_seconds()
        task = self._writes[name] = asyncio.create_task(self._write(name, moment))
        task.add_done_callback(lambda _: self._writes.pop(name, None))

    async def _write(self, name: str, moment: datetime) -> None:
        stamp = {labels.LAST_ACTIVITY: timestamp(moment)}
        try:
            await self._api.annotate(labels.TRAINING_SESSIONS, name, stamp)
        except (ClusterUnreachable, ClusterRefused) as error:
            self._not_before[name] = time.monotonic() + _AFTER_FAILURE_SECONDS
            log.warning("could not say that a session is used", session=name, error=str(error))

    def forget(self, name: str) -> None:
        """Drop what is known of a session that is no more."""
        self._not_before.pop(name, None)

    async def stop(self) -> None:
        """Finish the writes that have begun."""
        await asyncio.gather(*self._writes.values())
