"""Leader election: only the replica that holds the Lease acts.

The election itself is the Kubernetes client's. In addition, an unreachable API server counts as a
failed attempt instead of ending the process; losing the Lease ends the term, waits for its end, and
starts a new campaign; and a leader that stops releases its Lease at once.

A process can be paused for longer than its Lease lasts and then continue. Every request to the API
server therefore checks `may_act` first, which compares times: until the Lease has been renewed, a
former leader sends no requests.
"""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

import aiohttp
import structlog
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from tinkercloud_operator import metrics
from tinkercloud_operator.settings import Settings

log = structlog.get_logger(__name__)

_Found = tuple[bool, LeaderElectionRecord] | tuple[bool, Exception] | tuple[bool, None]


class _Lock(LeaseLock):
    """A Lease that counts as not held while it is unreachable."""

    renewed_at = float("-inf")
    """Start time of its last successful write (`time.monotonic`)."""

    def __init__(self, api: client.ApiClient, settings: Settings) -> None:
        super().__init__(settings.lease_name, settings.namespace, settings.identity, api)
        self._timeout_seconds: float = settings.lease_renew_seconds

    async def get(self, name: str, namespace: str) -> _Found:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                found = await super().get(name, namespace)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return False, ApiException(status=0, reason=f"{type(error).__name__}: {error}")
        if isinstance(found[1], LeaderElectionRecord) and found[1].holder_identity != self.identity:
            self.renewed_at = float("-inf")
        return found

    async def create(
        self, name: str, namespace: str, election_record: LeaderElectionRecord
    ) -> bool:
        # The client's own version passes an argument that its API rejects (37.0.2).
        metadata = client.V1ObjectMeta(name=name)
        body = client.V1Lease(metadata=metadata, spec=self.update_lease(election_record))
        started = monotonic()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self.api_instance.create_namespaced_lease(namespace, body)
        except (ApiException, aiohttp.ClientError, OSError, TimeoutError) as error:
            log.info("could not create the Lease", error=str(error))
            return False
        self.renewed_at = started
        return True

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        started = monotonic()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                is_written = await super().update(name, namespace, updated_record)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        if is_written:
            self.renewed_at = started
        return is_written


class Leadership:
    """Runs a term whenever, and for as long as, this replica leads."""

    def __init__(self, api: client.ApiClient, settings: Settings) -> None:
        self._settings = settings
        self._lock = _Lock(api, settings)
        self._term: asyncio.Task[None] | None = None

    @property
    def is_leader(self) -> bool:
        """Whether a term is running."""
        return self._term is not None and not self._term.done()

    @property
    def seconds_since_renewal(self) -> float:
        """Seconds since the Lease was last renewed; infinite if it never was."""
        return monotonic() - self._lock.renewed_at

    def may_act(self) -> bool:
        """Return whether the Lease is held, with time left for one request."""
        return self.seconds_since_renewal < self._settings.lease_renew_seconds

    async def run(self, term: Callable[[], Awaitable[None]]) -> None:
        """Campaign forever; run a term while the Lease is held, and cancel it when it is lost.

        Raises:
            Exception: a term failed.
        """
        while True:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            election = LeaderElection(self._config(term, ended))
            competing = asyncio.create_task(election.run())
            try:
                await asyncio.wait({competing, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                competing.cancel()
                await self._end_term()
            if ended.done():
                ended.result()
            await competing
            log.warning("lost the Lease; campaigning again")

    def _config(self, term: Callable[[], Awaitable[None]], ended: "asyncio.Future[None]") -> Config:
        async def begin() -> None:
            log.info("leading", identity=self._settings.identity)
            metrics.IS_LEADER.set(1)
            self._term = asyncio.current_task()
            try:
                await term()
            except Exception as error:  # noqa: BLE001 - `run` raises it
                ended.set_exception(error)

        async def end() -> None:
            metrics.IS_LEADER.set(0)

        return Config(
            self._lock,
            lease_duration=self._settings.lease_seconds,
            renew_deadline=self._settings.lease_renew_seconds,
            retry_period=self._settings.lease_retry_seconds,
            onstarted_leading=begin,
            onstopped_leading=end,
        )

    async def _end_term(self) -> None:
        metrics.IS_LEADER.set(0)
        term, self._term = self._term, None
        if term is not None:
            term.cancel()
            await asyncio.wait({term})

    async def resign(self) -> None:
        """Release the Lease, if this replica holds it."""
        name, namespace = self._settings.lease_name, self._settings.namespace
        api = self._lock.api_instance
        try:
            async with asyncio.timeout(self._settings.lease_renew_seconds):
                lease = await api.read_namespaced_lease(name, namespace)
                if lease.spec is None or lease.spec.holder_identity != self._settings.identity:
                    return
                lease.spec.holder_identity = None
                await api.replace_namespaced_lease(name, namespace, lease)
        except (ApiException, aiohttp.ClientError, OSError, TimeoutError) as error:
            log.info("could not release the Lease", error=str(error))
