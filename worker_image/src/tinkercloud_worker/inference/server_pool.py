"""The servers of a sampler: which of them are in use, and which one serves a request.

Engines that follow the load are numbered; the first ones are in use. One that joins gets the
adapters that the others have before its first request. One that leaves gets no new request, and
finishes those it has.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import structlog

from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_worker.inference import routing
from tinkercloud_worker.inference.client import ServerUnreachable
from tinkercloud_worker.inference.inference_server import InferenceServer

log = structlog.get_logger(__name__)

_RELEASE_SECONDS = 15.0
"""Time for a server that leaves to unload adapters; it may continue if it is needed again."""


class ServerPool:
    """Equivalent servers of the base model. Belongs to one event loop."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        number: int,
        load: Callable[[InferenceServer, str], Awaitable[None]],
        unload: Callable[[InferenceServer, str], Awaitable[None]],
    ) -> None:
        """Create a pool without calling the servers.

        Args:
            servers: all servers that may exist.
            number: how many of them are in use: the first ones.
            load: loads an adapter on a server that joins.
            unload: unloads an adapter from a server that leaves; raises nothing.
        """
        self.all = {server.url: server for server in servers}
        self._number = number
        self._load = load
        self._unload = unload
        self._joining: dict[str, asyncio.Task[None]] = {}
        """By URL: servers in use that get no requests yet."""
        self._changed = asyncio.Event()
        """Set, and replaced, when other servers are in use, or one has joined."""

    @property
    def in_use(self) -> list[InferenceServer]:
        """The servers that get requests, or will when they are ready."""
        return list(self.all.values())[: self._number]

    def use(self, number: int) -> None:
        """Use only the first servers; others finish the requests that they have."""
        before, self._number = self._number, number
        servers = list(self.all.values())
        for server in servers[before:number]:
            server.wait_until_healthy()
            self._joining[server.url] = asyncio.create_task(self._join(server))
        for server in servers[number:]:
            if (joining := self._joining.pop(server.url, None)) is not None:
                joining.cancel()
        if number != before:
            self._announce_change()

    def _announce_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def is_left(self, number: int) -> bool:
        """Return whether no server after the first ones has a request."""
        return all(server.running == 0 for server in list(self.all.values())[number:])

    async def release(self, number: int) -> None:
        """Free what the servers after the first ones have, which have no requests and may end."""
        leaving = list(self.all.values())[number:]
        unloads = [self._unload(each, name) for each in leaving for name in each.adapters]
        with suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_SECONDS):
                await asyncio.gather(*unloads)
        for server in leaving:
            server.forget()

    async def choose(self, key: str, seconds: float) -> InferenceServer:
        """Return the server for a request with a routing key.

        Args:
            key: requests with the same key share prompts.
            seconds: how long to wait if no server responds.

        Raises:
            ServerUnreachable: none recovered in time.
        """
        deadline = time.monotonic() + seconds
        while True:
            candidates = self.in_use
            up = {
                each.url: each.running
                for each in candidates
                if each.is_up and each.url not in self._joining
            }
            if up:
                return self.all[routing.choose(key, up)]
            if not await self._any_may_be_usable(candidates, deadline - time.monotonic()):
                urls = ", ".join(each.url for each in candidates)
                raise ServerUnreachable(
                    f"no inference server responds ({urls}), and none recovered within"
                    f" {seconds:.0f} s; send the request again"
                )

    async def _any_may_be_usable(
        self, candidates: Sequence[InferenceServer], seconds: float
    ) -> bool:
        """Wait until a server gets requests or others are in use; return whether one was."""
        waits = [self._changed.wait(), *(self._usable(each) for each in candidates)]
        tasks = [asyncio.ensure_future(each) for each in waits]
        try:
            done, _ = await asyncio.wait(
                tasks, timeout=max(seconds, 0), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in tasks:
                task.cancel()
        return bool(done)

    async def _usable(self, server: InferenceServer) -> None:
        """Wait until a server gets requests."""
        joining = self._joining.get(server.url)
        if joining is not None:
            await asyncio.wait({joining})
        await server.recovered()

    async def _join(self, server: InferenceServer) -> None:
        """Let a server get requests once it has the adapters of the others."""
        try:
            await server.recovered()
            adapters = {name for each in self.in_use for name in each.adapters}
            for adapter in sorted(adapters):
                await self._load(server, adapter)
            log.info("an engine gets requests now", url=server.url, adapters=len(adapters))
        except ServerUnreachable as error:
            server.begin_recovery(error)
        except WireError as error:
            # It loads what is missing with the first request that needs it.
            log.warning("an engine joins without adapters", url=server.url, reason=error.message)
        finally:
            if self._joining.get(server.url) is asyncio.current_task():
                del self._joining[server.url]
                self._announce_change()
