"""Delivers deferred requests to session heads as soon as these are ready."""

import asyncio
import contextvars
from contextlib import suppress
from weakref import WeakValueDictionary

import orjson
import structlog

from tinkercloud_api.access.owner_tenants import Tenants
from tinkercloud_api.checkpoints.deferred_requests import Deferred, DeferredRequests
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.heads.proxy import Proxy, StaleEndpoint
from tinkercloud_api.providers.base import HeadEndpoint, SessionProvider
from tinkercloud_api.providers.head_http_client import HeadUnreachable
from tinkercloud_protocol.wire.asgi import Message
from tinkercloud_protocol.wire.errors import Overloaded, StateLost, Unavailable, WireError

log = structlog.get_logger(__name__)

_RESPONSE_SECONDS = 60.0
_MAX_PAUSE_SECONDS = 60.0
_LEFTOVERS_SECONDS = 60.0
"""Time between two looks for requests of processes that have ended."""
_DELIVERY_SECONDS = 2.0
"""How long polls for results of other requests wait for a delivery that fails."""


class Deliveries:
    """Tasks that deliver the deferred requests, one task for each target. Of one event loop."""

    def __init__(
        self,
        deferred: DeferredRequests,
        locator: HeadLocator,
        provider: SessionProvider,
        proxy: Proxy,
        tenants: Tenants,
    ) -> None:
        self._deferred = deferred
        self._locator = locator
        self._provider = provider
        self._proxy = proxy
        self._tenants = tenants
        self._starting: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._due: set[str] = set()
        """Targets that have requests which their task has not seen yet."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held while the requests of a target are read and sent, one after another."""

    def start(self) -> None:
        """Deliver what other processes have left in the store, in the background."""
        self._starting = asyncio.create_task(self._deliver_leftovers())

    async def _deliver_leftovers(self) -> None:
        while True:
            try:
                for target in await self._deferred.targets():
                    self.begin(target)
            except Unavailable as error:
                # A poll for a result delivers the request as well.
                log.warning("cannot list deferred requests", reason=error.message)
            await asyncio.sleep(_LEFTOVERS_SECONDS)

    async def stop(self) -> None:
        """End all tasks; the requests stay in the store."""
        tasks = [*self._tasks.values()]
        if self._starting is not None:
            tasks.append(self._starting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(self, target: str) -> None:
        """Deliver the requests of a target in the background, once it has a head."""
        self._due.add(target)
        if target not in self._tasks:
            # Without the request id of the first request, which others follow.
            context = contextvars.Context()
            self._tasks[target] = asyncio.create_task(self._run(target), context=context)

    def has_finished(self, target: str) -> bool:
        """Whether this process is delivering no requests of a target."""
        return target not in self._tasks

    async def finished(self, target: str) -> None:
        """Wait a moment for this process to deliver the requests of a target."""
        if (task := self._tasks.get(target)) is not None:
            await asyncio.wait({task}, timeout=_DELIVERY_SECONDS)

    async def deliver(self, target: str) -> bool:
        """Deliver what any process has stored for a target; return whether that was anything.

        A request is read just before it is sent: one that was cancelled, or whose failure was
        reported, while the head was loading is not executed.

        Raises:
            Unavailable: the head or the store does not respond.
            Overloaded: the head's queue of the owner is full.
            WireError: no head can ever serve the target.
        """
        if not await self._deferred.has_any(target):
            return False
        endpoint, num_sent = await self._locator.head_of(target), 0
        async with self._locks.setdefault(target, asyncio.Lock()):
            async for request in self._deferred.of_target(target):
                await self._send(request, endpoint)
                num_sent += 1
        return num_sent > 0

    async def _run(self, target: str) -> None:
        failures = 0
        try:
            while target in self._due:
                self._due.discard(target)
                try:
                    await self._deliver_or_drop(target)
                    failures = 0
                except WireError as error:
                    failures += 1
                    self._due.add(target)
                    log.info("deferred requests wait", target=target, reason=error.message)
                    await asyncio.sleep(min(2.0 ** (failures - 1), _MAX_PAUSE_SECONDS))
        finally:
            del self._tasks[target]

    async def _deliver_or_drop(self, target: str) -> None:
        try:
            await self.deliver(target)
        except WireError as error:
            if may_pass(error):
                raise
            # Polls for the results report the same.
            log.info("dropping deferred requests", target=target, reason=error.message)
            await self._deferred.remove_all(target)

    async def _send(self, request: Deferred, endpoint: HeadEndpoint) -> None:
        status, answer = await self._post(request, endpoint)
        if status == Overloaded.status:
            raise Overloaded(_detail(answer))
        if status >= 500:
            raise Unavailable(_detail(answer))
        is_rejected = 400 <= status < 500 and status != StateLost.status
        if is_rejected and request.is_in_sequence:
            await self._post(request.refused(_detail(answer)), endpoint)
        await self._deferred.remove(request.target, request.seq_id)

    async def _post(self, request: Deferred, endpoint: HeadEndpoint) -> tuple[int, bytes]:
        messages: list[Message] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        try:
            await self._proxy.forward(
                collect,
                endpoint,
                request.path,
                target=request.target,
                owner=request.owner,
                headers=request.headers,
                body=request.body,
                refusal=request.refusal,
                extra={**self._tenants.headers(request.owner), **request.extra},
                timeout_seconds=_RESPONSE_SECONDS,
            )
        except StaleEndpoint:
            self._provider.invalidate(endpoint)
            self._locator.note_refusal(request.target, endpoint)
            raise
        except HeadUnreachable as error:
            raise Unavailable(f"{error} in the middle of its response") from None
        return messages[0]["status"], b"".join(each.get("body", b"") for each in messages)


def may_pass(error: WireError) -> bool:
    """Return whether the same request may succeed later: a head may still serve its target."""
    return error.status == Overloaded.status or error.status >= 500


def _detail(answer: bytes) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(orjson.loads(answer)["detail"])
    return "the session head rejected the request"
