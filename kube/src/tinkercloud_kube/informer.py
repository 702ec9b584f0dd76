"""A copy of all objects of a kind in memory, kept up to date by list and watch.

Readers use the copy, never Kubernetes. While Kubernetes is unavailable the copy stays as it was;
afterwards the watch continues from where it was, or everything is listed again.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import aclosing
from typing import Generic, TypeVar

import structlog

from tinkercloud_kube.client import Client, Event
from tinkercloud_kube.errors import Expired, KubernetesError
from tinkercloud_kube.objects import Change, Manifest, Objects

log = structlog.get_logger(__name__)

T = TypeVar("T")

_WATCH_SECONDS = (40, 60)
"""Short, because a stream that died silently is noticed at its end; random, so that replicas do
not reconnect all at once."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


_ANY = ""
"""Stands for any name among those that somebody waits for."""


def pause_seconds(failures: int) -> float:
    """Return how long to wait after consecutive failures: exponential, with jitter."""
    longest: float = min(
        _LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10)
    )
    return longest * random.uniform(0.5, 1)  # noqa: S311 - spreads retries, guards nothing


class Informer(Generic[T]):
    """The objects of one kind. Belongs to one event loop."""

    def __init__(
        self,
        client: Client,
        kind: str,
        keep: Callable[[Manifest], T | None],
        on_gone: Callable[[str], None] = lambda _name: None,
    ) -> None:
        """Create an empty copy; `run` fills it.

        Args:
            client: lists and watches.
            kind: of the objects.
            keep: returns what is kept of a manifest, or None to leave the object out.
            on_gone: called with the name of every object that is gone.
        """
        self._client = client
        self._kind = kind
        self._objects: Objects[T] = Objects(keep)
        self._on_gone = on_gone
        self._position: int | None = None
        """Resource version up to which everything has been seen; None if a list is needed."""
        self._newest = 0
        """Newest resource version that was seen."""
        self._waiters: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self.is_filled = asyncio.Event()
        """Set once everything has been listed."""

    def get(self, name: str) -> T | None:
        """Return an object."""
        return self._objects.get(name)

    def objects(self) -> Collection[T]:
        """Return all objects."""
        return self._objects.values()

    def forget(self, name: str) -> None:
        """Drop an object that is gone, or that has just been deleted."""
        self._announce(self._objects.forget(name))

    async def changed(self, name: str, since: T | None) -> None:
        """Wait until an object differs from what it was.

        Args:
            name: of the object.
            since: what `get` returned.
        """
        while self.get(name) is since:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[name].add(waiter)
            try:
                await waiter
            finally:
                waiters = self._waiters[name]
                waiters.discard(waiter)
                if not waiters:
                    del self._waiters[name]

    async def any_change(self) -> None:
        """Wait until any object changes."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[_ANY].add(waiter)
        try:
            await waiter
        finally:
            self._waiters[_ANY].discard(waiter)

    async def run(self) -> None:
        """Keep the copy up to date until cancelled."""
        failures = 0
        while True:
            try:
                if self._position is None:
                    self._position = await self._list()
                await self._follow(self._position)
                failures = 0
            except Expired:
                failures += 1
                self._position = None
                if failures > 1:
                    await asyncio.sleep(pause_seconds(failures))
            except KubernetesError as error:
                failures += 1
                log.warning("lost the connection to Kubernetes", kind=self._kind, error=str(error))
                await asyncio.sleep(pause_seconds(failures))
            except Exception:
                failures += 1
                self._position = None
                log.exception("could not read an answer of Kubernetes", kind=self._kind)
                await asyncio.sleep(pause_seconds(failures))

    async def _list(self) -> int:
        log.info("listing all objects", kind=self._kind)
        page = await self._client.list_all(self._kind)
        if page.version < self._newest:
            # The cluster's data was restored from a backup, so what is newer never happened.
            for name in list(self._objects):
                self.forget(name)
        self._newest = page.version
        for change in self._objects.replace(page.items, page.version):
            self._announce(change)
        self.is_filled.set()
        return page.version

    async def _follow(self, position: int) -> None:
        """Apply changes as they arrive, until Kubernetes ends the stream."""
        seconds = random.randint(*_WATCH_SECONDS)  # noqa: S311 - spreads load, guards nothing
        async with aclosing(self._client.watch(self._kind, position, seconds)) as events:
            async for event in events:
                self._take(event)

    def _take(self, event: Event) -> None:
        if event.type != "BOOKMARK":
            self._announce(self._objects.note(event.object, is_gone=event.type == "DELETED"))
        self._position = self._newest = int(event.object["metadata"]["resourceVersion"])

    def _announce(self, change: Change[T] | None) -> None:
        if change is None or change.before is change.after:
            return
        if change.after is None:
            self._on_gone(change.name)
        for waiter in [*self._waiters.get(change.name, ()), *self._waiters.get(_ANY, ())]:
            if not waiter.done():
                waiter.set_result(None)
