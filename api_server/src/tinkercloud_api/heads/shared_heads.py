"""Calls to heads that are shared by many runs: listing their models and suspending inactive ones.

A client that disappears without ending its session leaves its models in a shared head. When the
session has had no heartbeat and a model no request for `session_silence_seconds`, the head suspends
the model. The next request resumes it; nothing is lost, however long the client is inactive.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import aiohttp
import structlog
from pydantic import BaseModel

from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.heads.activity import Activity
from tinkercloud_api.heads.known_runs import placement_of
from tinkercloud_api.providers.base import HeadEndpoint, SessionProvider
from tinkercloud_protocol.heads.head_messages import (
    ForgetResults,
    Forgotten,
    ModelSuspended,
    RecordedSession,
    RecordedSessionList,
    RecordedSessionsOf,
)
from tinkercloud_protocol.heads.launch import HeldModel, HeldModels
from tinkercloud_protocol.heads.request_timeline import Span, Timeline
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import Unavailable

log = structlog.get_logger(__name__)

_LIST_SECONDS = 10.0
_SHOW_SECONDS = 2.0
"""How long somebody who looks at a list waits for a head that does not respond."""
_SUSPEND_SECONDS = 600.0
"""A head responds only after it has written the whole model."""
_ORPHANED_AFTER = timedelta(minutes=10)
"""How long no run must have claimed a model of a head before it is dropped."""
_ROUNDS_MISSED = 3
"""Missed rounds after which this machine or process is assumed to have been paused, so that clients
could not be heard."""


def models_of(answers: Mapping[HeadEndpoint, HeldModels]) -> dict[str, HeldModel]:
    """Return the models that heads hold, by id."""
    return {model.model_id: model for answer in answers.values() for model in answer.models}


class SharedHeads:
    """The heads of this server that are shared by many clients."""

    def __init__(
        self,
        catalog: Catalog,
        provider: SessionProvider,
        activity: Activity,
        client: aiohttp.ClientSession,
        *,
        inactivity: timedelta,
        period: timedelta,
    ) -> None:
        """Create it.

        Args:
            catalog: has the last activity of sessions and runs.
            provider: has the endpoints of the heads.
            activity: has the activity that is not yet in the catalog.
            client: HTTP client for calls to heads.
            inactivity: client inactivity after which its models are suspended.
            period: interval between two calls of `suspend_inactive`.
        """
        self._catalog = catalog
        self._provider = provider
        self._activity = activity
        self._client = client
        self._inactivity = inactivity
        self._longest_pause = period * _ROUNDS_MISSED
        self._listening_since: datetime | None = None
        self._last_round: datetime | None = None
        self._unclaimed: dict[tuple[str, str], datetime] = {}
        """When a model that no run claims was first seen, by generation of its head and id."""

    async def models(self) -> dict[str, HeldModel]:
        """Return the models of all heads that respond, by id."""
        return models_of(await self._held(_LIST_SECONDS))

    async def shown(self) -> dict[HeadEndpoint, HeldModels]:
        """Return what the heads hold that respond within two seconds, for somebody who looks."""
        return await self._held(_SHOW_SECONDS)

    def by_cluster(self, answers: Mapping[HeadEndpoint, HeldModels]) -> dict[str, HeldModels]:
        """Return what heads of pool clusters hold, by name of the cluster."""
        clusters = self._provider.clusters_of_heads()
        return {clusters[head]: held for head, held in answers.items() if head in clusters}

    async def _held(self, seconds: float) -> dict[HeadEndpoint, HeldModels]:
        """Return what the heads hold that respond in time."""
        heads = self._provider.shared_heads()
        calls = [self._models_of(endpoint, seconds) for endpoint in heads]
        held: dict[HeadEndpoint, HeldModels] = {}
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for head, answer in zip(heads, answers, strict=True):
            if isinstance(answer, Unavailable):
                log.warning("cannot list the models of a session head", error=answer.message)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                held[head] = answer
        return held

    async def forget_results(self, which: ForgetResults) -> int:
        """Drop results of an owner on all shared heads and on the owner's own heads.

        Returns:
            How many were dropped.

        Raises:
            Unavailable: a head did not respond; the others have dropped theirs.
        """
        answers = await self._call_all(which.owner, routes.HEAD_FORGET_RESULTS, which)
        return sum(Forgotten.model_validate_json(answer).num_results for answer in answers)

    async def recorded_sessions(self, owner: str) -> list[RecordedSession]:
        """Return the recorded sessions of an owner on the running heads of this server, by age.

        Raises:
            Unavailable: a head did not respond.
        """
        asked = RecordedSessionsOf(owner=owner)
        answers = await self._call_all(owner, routes.HEAD_RECORDED, asked)
        found = [RecordedSessionList.model_validate_json(answer).data for answer in answers]
        return sorted((each for listed in found for each in listed), key=lambda each: each.created)

    async def _call_all(self, owner: str, path: str, body: BaseModel) -> list[bytes]:
        """POST to the running heads that may have something of an owner.

        Raises:
            Unavailable: a head did not respond; the others have been called.
        """
        heads = {head.url: head for head in self._provider.heads_of(owner)}
        content = body.model_dump_json()
        calls = [self._call("POST", head, path, _LIST_SECONDS, content) for head in heads.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for failure in answers:
            if isinstance(failure, BaseException):
                raise failure
        return [answer for answer in answers if isinstance(answer, bytes)]

    async def spans(self, session_id: str, own: Sequence[HeadEndpoint]) -> list[Span]:
        """Return what the running heads remember of a session's requests.

        Args:
            session_id: the session.
            own: the running heads of its own runs.

        Raises:
            Unavailable: a head did not respond.
        """
        path = f"{routes.HEAD_TIMELINE}/{session_id}"
        heads = {head.url: head for head in (*self._provider.shared_heads(), *own)}
        calls = [self._call("GET", head, path, _LIST_SECONDS) for head in heads.values()]
        answers = await asyncio.gather(*calls)
        return [span for each in answers for span in Timeline.model_validate_json(each).spans]

    async def suspend_inactive(self, moment: datetime) -> None:
        """Suspend the models of clients that have been inactive for longer than the limit.

        Only time in which this server was able to receive heartbeats counts, which excludes the
        time before its start and while its machine was asleep.
        """
        last, self._last_round = self._last_round, moment
        if last is None or moment - last > self._longest_pause:
            self._listening_since = moment
        since = moment - self._inactivity
        if self._listening_since is None or self._listening_since > since:
            return
        await self._activity.write()
        for endpoint in self._provider.shared_heads():
            try:
                await self._suspend_inactive_in(endpoint, since)
            except Unavailable as error:
                log.warning("cannot suspend models of inactive clients", error=error.message)

    async def _suspend_inactive_in(self, endpoint: HeadEndpoint, since: datetime) -> None:
        in_memory = [
            m.model_id for m in (await self._models_of(endpoint)).models if not m.is_suspended
        ]
        for run_id in await self._catalog.inactive_runs(in_memory, since) if in_memory else []:
            path = f"{routes.HEAD_SUSPEND_MODEL}/{run_id}"
            response = await self._call("POST", endpoint, path, _SUSPEND_SECONDS)
            if ModelSuspended.model_validate_json(response).is_suspended:
                log.info("suspended the model of an inactive client", run_id=run_id)

    async def drop_orphans(self, moment: datetime) -> None:
        """Drop models from shared heads that no run has claimed for `_ORPHANED_AFTER`.

        A head that did not respond when a run ended keeps its model. A run that is being created
        or moved is claimed by its place long before and after.
        """
        seen: dict[tuple[str, str], datetime] = {}
        for endpoint in self._provider.shared_heads():
            placed = self._provider.placed_on(endpoint)
            if placed is None:
                continue
            try:
                held = {model.model_id for model in (await self._models_of(endpoint)).models}
                for name in sorted(held - placed):
                    key = (endpoint.generation, name)
                    seen[key] = self._unclaimed.get(key, moment)
                    if moment - seen[key] >= _ORPHANED_AFTER:
                        await self._drop_orphan(endpoint, name)
            except Unavailable as error:
                log.warning("cannot drop models that no run claims", error=error.message)
        self._unclaimed = seen

    async def _drop_orphan(self, endpoint: HeadEndpoint, name: str) -> None:
        """Drop a model, unless its run still exists; write a last checkpoint of it first.

        Not of a run that continues on another head: its checkpoints are newer.

        Raises:
            Unavailable: this cannot be determined now, or the head does not respond.
        """
        row = await self._catalog.run(name)
        was_last_here = row is not None and row.generation == endpoint.generation
        if row is not None and was_last_here:
            if row.deleted_at is None and not await self._provider.is_gone(placement_of(row)):
                return
            await self._call("POST", endpoint, f"{routes.HEAD_CHECKPOINT}/{name}", _SUSPEND_SECONDS)
        await self._call("DELETE", endpoint, f"{routes.HEAD_MODELS}/{name}", _LIST_SECONDS)
        log.warning("dropped a model that no run claims", run_id=name, had_run=was_last_here)

    async def _models_of(
        self, endpoint: HeadEndpoint, seconds: float = _LIST_SECONDS
    ) -> HeldModels:
        response = await self._call("GET", endpoint, routes.HEAD_MODELS, seconds)
        return HeldModels.model_validate_json(response)

    async def _call(
        self,
        method: str,
        endpoint: HeadEndpoint,
        path: str,
        seconds: float,
        body: str | None = None,
    ) -> bytes:
        headers = {
            routes.HEAD_TOKEN_HEADER: endpoint.token,
            routes.GENERATION_HEADER: endpoint.generation,
        }
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._client.request(
                method, endpoint.url + path, data=body, headers=headers, timeout=timeout
            ) as response:
                response.raise_for_status()
                return await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            # The text of the error may contain the request headers, which include the token.
            why = type(error).__name__
            raise Unavailable(f"the session head did not respond to {path}: {why}") from None
