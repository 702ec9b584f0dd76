"""Annotates sessions whose runs have become less safe than promised, for the operator.

Heads report it on their lease, which each replica holds, so several replicas may write the same.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress

import structlog

from tinkercloud_api.providers.cluster.session_status import TrainingSessionView
from tinkercloud_crds import labels
from tinkercloud_kube.client import Client, ObjectRef
from tinkercloud_kube.errors import KubernetesError, NotFound
from tinkercloud_protocol.heads.durability_settings import DurabilityReport

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 5.0


class DurabilityAnnotator:
    """Keeps the annotation `DEGRADED` equal to the newest reports. Belongs to one event loop."""

    def __init__(
        self, api: Client, sessions: Callable[[], Collection[TrainingSessionView]]
    ) -> None:
        """Create it.

        Args:
            api: writes the annotations.
            sessions: returns all sessions, as last seen.
        """
        self._api = api
        self._sessions = sessions
        self._reported: dict[str, Mapping[str, str | None]] = {}
        """The last report of each head, by its generation."""
        self._reporters: dict[str, str] = {}
        """The generation of the head that reported each run last."""
        self._wanted: dict[str, str | None] = {}
        """The annotation that each run still needs, by model id; None to remove it."""
        self._writing: asyncio.Task[None] | None = None

    def note(self, report: DurabilityReport) -> None:
        """Annotate the sessions of the models whose state differs from the previous report."""
        now, before = report.models, self._reported.get(report.generation, {})
        # A model that is no longer reported is in the store, or deleted, or at another head.
        gone = [
            model
            for model in before.keys() - now.keys()
            if self._reporters.get(model) == report.generation
        ]
        # What another head, or another process, has written about a model that is new here.
        known = {**dict(self._annotated()), **before}
        self._wanted |= {
            model: now.get(model) for model in (*gone, *now) if known.get(model) != now.get(model)
        }
        self._reported[report.generation] = now
        self._reporters |= dict.fromkeys(now, report.generation)
        if self._wanted and self._writing is None:
            self._writing = asyncio.create_task(self._write())

    def forget(self, generation: str) -> None:
        """Drop the last report of a head whose lease has ended."""
        for model in self._reported.pop(generation, {}):
            if self._reporters.get(model) == generation:
                del self._reporters[model]

    def _annotated(self) -> Iterator[tuple[str, str]]:
        """Yield the runs that are annotated, with their annotations."""
        for session in self._sessions():
            if session.spec.model_id is not None and session.degraded is not None:
                yield session.spec.model_id, session.degraded

    async def _write(self) -> None:
        try:
            while self._wanted:
                # The oldest first, so that one that can't be written delays the others only.
                model = next(iter(self._wanted))
                reason = self._wanted.pop(model)
                try:
                    await self._annotate(model, reason)
                except KubernetesError as error:
                    self._wanted.setdefault(model, reason)
                    log.warning(
                        "cannot annotate a session with its durability; retrying",
                        model_id=model,
                        error=str(error),
                    )
                    await asyncio.sleep(_RETRY_SECONDS)
        finally:
            self._writing = None

    async def _annotate(self, model: str, reason: str | None) -> None:
        change = {"metadata": {"annotations": {labels.DEGRADED: reason}}}
        sessions = [each.name for each in self._sessions() if each.spec.model_id == model]
        for name in sessions:
            with suppress(NotFound):
                await self._api.merge(ObjectRef("TrainingSession", name), change)

    async def stop(self) -> None:
        """Stop writing. The next process that holds the leases writes what is missing."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
