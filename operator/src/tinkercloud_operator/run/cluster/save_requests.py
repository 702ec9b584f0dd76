"""Save requests to session heads, sent in the background.

Saving a large model takes minutes, and many heads may save at the same time. Workers do not wait
for them: they reconcile other sessions, and a completed save enqueues its session.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import structlog

from tinkercloud_operator import metrics
from tinkercloud_operator.decide.session.actions import GiveAway, HeadRequest
from tinkercloud_operator.run.cluster.head_calls import HeadClient, SaveFailed
from tinkercloud_operator.spec.observed import FailedSave, SaveKey

log = structlog.get_logger(__name__)


class HeadSaver:
    """Tracks pending and completed saves. Belongs to one event loop.

    Args:
        client: sends the requests.
        on_saved: called with the name of a session whose head has completed a save, or has refused
            to give its model away.
    """

    def __init__(self, client: HeadClient, on_saved: Callable[[str], object]) -> None:
        self._client = client
        self._on_saved = on_saved
        self._queue: asyncio.Queue[tuple[str, HeadRequest]] = asyncio.Queue()
        self._pending: set[tuple[str, SaveKey]] = set()
        """With the session's name."""
        self._completed: dict[str, Mapping[SaveKey, str | None]] = {}
        self._failed: dict[str, Mapping[SaveKey, FailedSave]] = {}

    def completed(self, session: str) -> Mapping[SaveKey, str | None]:
        """Return a session's completed saves, each with its checkpoint, if it created one."""
        return self._completed.get(session, {})

    def pending(self, session: str) -> frozenset[SaveKey]:
        """Return a session's saves that are in progress."""
        return frozenset(key for name, key in self._pending if name == session)

    def failed(self, session: str) -> Mapping[SaveKey, FailedSave]:
        """Return a session's saves that failed and have not completed since."""
        return self._failed.get(session, {})

    def submit(self, session: str, request: HeadRequest) -> None:
        """Start a save, unless it is already in progress."""
        pending = session, (request.kind, request.incarnation)
        if pending not in self._pending:
            self._pending.add(pending)
            self._queue.put_nowait((session, request))

    def discard(self, session: str, kind: str) -> None:
        """Forget completed saves of a kind, whose outcome has been used."""
        if session in self._completed:
            kept = {key: each for key, each in self._completed[session].items() if key[0] != kind}
            self._completed[session] = kept

    def forget(self, session: str) -> None:
        """Forget a deleted session; the results of its pending saves are dropped."""
        self._completed.pop(session, None)
        self._failed.pop(session, None)
        self._pending = {key for key in self._pending if key[0] != session}

    async def work(self) -> None:
        """Send submitted requests concurrently, forever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._save(*await self._queue.get()))

    async def _save(self, session: str, request: HeadRequest) -> None:
        key = (request.kind, request.incarnation)
        failure, result = SaveFailed("no answer"), None
        try:
            result = await self._client.save(session, request)
        except SaveFailed as error:
            failure = error
            log.warning(
                "the head did not save its state",
                session=session,
                kind=request.kind,
                error=str(error),
            )
        except Exception as error:
            failure = SaveFailed(f"{type(error).__name__}: {error}")
            log.exception(
                "the save request failed unexpectedly", session=session, kind=request.kind
            )
        if (session, key) not in self._pending:
            return
        self._pending.discard((session, key))
        if result is None:
            self._record_failure(session, key, failure)
            if failure.is_refused and isinstance(request, GiveAway):
                # The requests of the run are held until the move is cancelled.
                self._on_saved(session)
            return
        failed = {other: each for other, each in self.failed(session).items() if other != key}
        self._failed[session] = failed
        self._completed[session] = {**self.completed(session), key: result.latest_checkpoint}
        self._on_saved(session)

    def _record_failure(self, session: str, key: SaveKey, failure: SaveFailed) -> None:
        kind, incarnation = key
        metrics.SAVES_FAILED.labels(kind).inc()
        before = self.failed(session).get(key)
        attempts = before.attempts + 1 if before is not None else 1
        of_this_head = {k: v for k, v in self.failed(session).items() if k[1] == incarnation}
        latest = FailedSave(str(failure), attempts, datetime.now(UTC), failure.is_refused)
        self._failed[session] = {**of_this_head, key: latest}
