"""Resolves a ready TrainingSession to the endpoint of its head: address, token, generation.

The token is read from a Secret and the generation from the head itself, once for each process that
serves the session (`status.incarnation`), and cached. While an endpoint is cached, the lease of the
head is held, on which it reports its usage and which models are durable.
"""

import asyncio
from dataclasses import dataclass

import aiohttp
import structlog

from tinkercloud_api.providers.base import HeadEndpoint, RecordReport
from tinkercloud_api.providers.cluster.session_durability import DurabilityAnnotator
from tinkercloud_api.providers.cluster.session_status import Ready, TrainingSessionView
from tinkercloud_api.providers.head_lease import hold_lease
from tinkercloud_crds import labels
from tinkercloud_crds.names import Names
from tinkercloud_kube.client import Client
from tinkercloud_protocol.heads.launch import HeadStatus, protocol_refusal
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import Unavailable

log = structlog.get_logger(__name__)

_STATUS_SECONDS = 10.0


class HeadUnresponsive(Exception):
    """A head whose session is ready cannot be identified; retrying may help."""


@dataclass(frozen=True, slots=True)
class _Cached:
    uid: str
    incarnation: str
    endpoint: HeadEndpoint


class HeadEndpoints:
    """Endpoints of running heads. Belongs to one event loop."""

    def __init__(
        self,
        api: Client,
        client: aiohttp.ClientSession,
        record_report: RecordReport,
        durability: DurabilityAnnotator,
    ) -> None:
        """Create it; see `SessionProvider.start` for `record_report`."""
        self._api = api
        self._client = client
        self._record_report = record_report
        self._durability = durability
        self._leases: dict[HeadEndpoint, asyncio.Task[None]] = {}
        self._cached: dict[str, _Cached] = {}
        self._resolving: dict[tuple[str, str], asyncio.Task[HeadEndpoint]] = {}

    def cached(self, session: TrainingSessionView, ready: Ready) -> HeadEndpoint | None:
        """Return the cached endpoint of the process that serves a session now, or None."""
        known = self._cached.get(session.name)
        is_current = known is not None and (known.uid, known.incarnation) == (
            session.uid,
            ready.incarnation,
        )
        return known.endpoint if known is not None and is_current else None

    async def resolve(self, session: TrainingSessionView, ready: Ready) -> HeadEndpoint:
        """Return the endpoint of the process that serves a session now.

        Raises:
            HeadUnresponsive: the head does not respond, or its token does not exist.
            Unavailable: this release and the head's do not speak the same protocol.
            ClusterUnreachable: the token cannot be read now.
            ClusterRefused: reading the token is not permitted.
        """
        known = self.cached(session, ready)
        if known is not None:
            return known
        key = (session.uid, ready.incarnation)
        task = self._resolving.get(key)
        if task is None:
            task = self._resolving[key] = asyncio.create_task(self._resolve(session, ready))
            task.add_done_callback(lambda _: self._resolving.pop(key, None))
        return await asyncio.shield(task)

    async def _resolve(self, session: TrainingSessionView, ready: Ready) -> HeadEndpoint:
        secret = Names(session.name).token_secret
        token = (await self._api.secret(secret)).get(labels.TOKEN_KEY, b"").decode().strip()
        if not token:
            raise HeadUnresponsive(f"Secret {secret} has no entry {labels.TOKEN_KEY!r}")
        status = await self._status(ready.endpoint, token)
        if why := protocol_refusal(status):
            raise Unavailable(
                f"{why}; upgrade the one that is older: API servers with their chart, a head by"
                f" suspending and resuming TrainingSession {session.name}"
            )
        endpoint = HeadEndpoint(ready.endpoint, token, status.generation)
        self._cached[session.name] = _Cached(session.uid, ready.incarnation, endpoint)
        if endpoint not in self._leases:
            self._leases[endpoint] = asyncio.create_task(self._hold_lease(endpoint))
        return endpoint

    async def _hold_lease(self, endpoint: HeadEndpoint) -> None:
        try:
            await hold_lease(self._client, endpoint, self._record_report, self._durability.note)
        except (aiohttp.ClientError, OSError) as error:
            log.info("the lease of a session head has ended", why=type(error).__name__)
        finally:
            # The next use of the head looks it up again, and holds its lease if it still runs.
            self.invalidate(endpoint)
            self._durability.forget(endpoint.generation)
            del self._leases[endpoint]

    async def stop(self) -> None:
        """End the leases."""
        leases = list(self._leases.values())
        for lease in leases:
            lease.cancel()
        await asyncio.gather(*leases, return_exceptions=True)

    async def _status(self, url: str, token: str) -> HeadStatus:
        try:
            async with self._client.get(
                url + routes.HEAD_STATUS,
                headers={routes.HEAD_TOKEN_HEADER: token},
                timeout=aiohttp.ClientTimeout(total=_STATUS_SECONDS),
                raise_for_status=True,
            ) as response:
                return HeadStatus.model_validate_json(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            what = str(error) or type(error).__name__
            raise HeadUnresponsive(f"the session head at {url} does not respond: {what}") from None

    def invalidate(self, endpoint: HeadEndpoint) -> None:
        """Drop an endpoint from the cache, so that it is resolved again."""
        for name, known in list(self._cached.items()):
            if known.endpoint == endpoint:
                del self._cached[name]

    def forget(self, name: str) -> None:
        """Drop the endpoint of a deleted session."""
        self._cached.pop(name, None)
