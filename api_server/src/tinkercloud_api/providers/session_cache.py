"""Informer: a copy of all objects of a custom resource, kept by list and watch.

Requests read the copy, never Kubernetes. While Kubernetes is away the copy stays as it was; when
it is back, the watch goes on where it was, or everything is listed again.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

import structlog
from pydantic import ValidationError

from tinkercloud_api.providers.cluster_api import (
    ClusterApi,
    ClusterRefused,
    ClusterUnreachable,
    Manifest,
    ResourceVersionGone,
)
from tinkercloud_protocol.wire import describe

log = structlog.get_logger(__name__)

_WATCH_SECONDS = (40, 60)
"""Short, because a stream that died silently is noticed at its end; random, so that replicas do
not come back all at once."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


class Versioned(Protocol):
    """An object of the copy."""

    @property
    def resource_version(self) -> str:
        """Differs between any two states of the object."""


ObjectT = TypeVar("ObjectT", bound=Versioned)


def pause_seconds(failures: int) -> float:
    """Return how long to wait after so many failures in a row: exponential, with jitter."""
    longest: float = min(
        _LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10)
    )
    return longest * random.uniform(0.5, 1)  # noqa: S311 - spreads retries, guards nothing


class Cache(Generic[ObjectT]):
    """The objects of one custom resource. Belongs to one event loop."""

    def __init__(
        self,
        api: ClusterApi,
        plural: str,
        read: Callable[[Manifest], ObjectT],
        gone: Callable[[str], None],
    ) -> None:
        """Make an empty copy; `run` fills it.

        Args:
            api: the cluster.
            plural: the resource.
            read: makes of an object what is kept of it; an object that it finds invalid is left
                out.
            gone: told the names of objects that are no more.
        """
        self._api = api
        self._plural = plural
        self._read = read
        self._gone = gone
        self._objects: dict[str, ObjectT] = {}
        self._position: str | None = None
        """Resource version up to which everything has been seen; None before the first list."""
        self._waiters: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self.is_filled = asyncio.Event()
        """Set once everything has been listed."""

    def get(self, name: str) -> ObjectT | None:
        """Return an object."""
        return self._objects.get(name)

    def objects(self) -> Collection[ObjectT]:
        """Return all objects."""
        return self._objects.values()

    def forget(self, name: str) -> None:
        """Drop an object that is gone, or that has just been deleted."""
        if self._objects.pop(name, None) is not None:
            self._gone(name)
            self._wake(name)

    async def changed(self, name: str, since: ObjectT | None) -> None:
        """Wait until an object differs from what it was.

        Args:
            name: the object.
            since: what was seen of it; None if it was not there.
        """
        while _version(self.get(name)) == _version(since):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[name].add(waiter)
            try:
                await waiter
            finally:
                waiters = self._waiters[name]
                waiters.discard(waiter)
                if not waiters:
                    del self._waiters[name]

    async def run(self) -> None:
        """Keep the copy, for ever."""
        failures = 0
        while True:
            try:
                if self._position is None:
                    self._position = await self._relist()
                await self._follow(self._position)
                failures = 0
            except ResourceVersionGone:
                failures += 1
                self._position = None
                if failures > 1:
                    await asyncio.sleep(pause_seconds(failures))
            except (ClusterUnreachable, ClusterRefused) as error:
                failures += 1
                log.warning("lost sight of Kubernetes", resource=self._plural, error=str(error))
                await asyncio.sleep(pause_seconds(failures))
            except Exception:
                failures += 1
                self._position = None
                log.exception("could not read what Kubernetes said", resource=self._plural)
                await asyncio.sleep(pause_seconds(failures))

    async def _relist(self) -> str:
        log.info("listing everything", resource=self._plural)
        listing = await self._api.list_all(self._plural)
        names = {item["metadata"]["name"] for item in listing.items}
        for name in self._objects.keys() - names:
            self.forget(name)
        for item in listing.items:
            self._put(item)
        self.is_filled.set()
        return listing.resource_version

    async def _follow(self, position: str) -> None:
        """Apply changes as they come, until Kubernetes ends the stream."""
        seconds = random.randint(*_WATCH_SECONDS)  # noqa: S311 - spreads load, guards nothing
        async with aclosing(self._api.watch(self._plural, position, seconds)) as events:
            async for event in events:
                metadata = event.object["metadata"]
                if event.type == "DELETED":
                    self.forget(metadata["name"])
                elif event.type != "BOOKMARK":
                    self._put(event.object)
                self._position = metadata["resourceVersion"]

    def _put(self, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        try:
            value = self._read(manifest)
        except ValidationError as error:
            # A later version may have written it; the others are none the worse for it.
            log.warning("left out", resource=self._plural, name=name, error=describe(error))
            self.forget(name)
            return
        if _version(self._objects.get(name)) != value.resource_version:
            self._objects[name] = value
            self._wake(name)

    def _wake(self, name: str) -> None:
        for waiter in self._waiters.get(name, ()):
            if not waiter.done():
                waiter.set_result(None)


def _version(value: Versioned | None) -> str | None:
    return None if value is None else value.resource_version
