"""A client of objects in memory that can be listed, changed and watched."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from tinkercloud_kube.client import Client, Event, ObjectRef, Page
from tinkercloud_kube.errors import NotFound
from tinkercloud_testing.cluster.kube_api.memory_api import Connection

Json = dict[str, Any]


class LiveObjects(Client):
    """A client whose objects a test changes while others watch them."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.client, "default", manager="a test")
        self.objects: defaultdict[str, dict[str, Json]] = defaultdict(dict)
        """By kind and name."""
        self._events: defaultdict[str, asyncio.Queue[Event]] = defaultdict(asyncio.Queue)
        self._version = 1

    def put(self, kind: str, name: str, manifest: Json) -> Json:
        """Create or replace an object."""
        self._version += 1
        metadata = {"uid": name, **manifest.get("metadata", {}), "name": name}
        stored = {**manifest, "metadata": {**metadata, "resourceVersion": str(self._version)}}
        self.objects[kind][name] = stored
        self._events[kind].put_nowait(Event("MODIFIED", stored))
        return stored

    def remove(self, kind: str, name: str) -> None:
        """Delete an object."""
        self._version += 1
        gone = self.objects[kind].pop(name)
        gone["metadata"]["resourceVersion"] = str(self._version)
        self._events[kind].put_nowait(Event("DELETED", gone))

    async def pages(self, kind: str, label_selector: str = "") -> AsyncIterator[Page]:
        yield await self.list_all(kind)

    async def list_all(self, kind: str) -> Page:
        return Page(list(self.objects[kind].values()), self._version)

    async def watch(self, kind: str, version: int, seconds: int) -> AsyncGenerator[Event, None]:
        while True:
            event = await self._events[kind].get()
            if int(event.object["metadata"]["resourceVersion"]) > version:
                yield event

    async def get(self, ref: ObjectRef) -> Json:
        if ref.name not in self.objects[ref.kind]:
            raise NotFound(f"no {ref.kind} {ref.name}", status=404)
        return self.objects[ref.kind][ref.name]

    async def merge(self, ref: ObjectRef, patch: Any) -> Json:
        before = await self.get(ref)
        return self.put(ref.kind, ref.name, _merged(before, patch))


def _merged(before: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    found = before if isinstance(before, dict) else {}
    both = {**found, **{key: _merged(found.get(key), value) for key, value in patch.items()}}
    return {key: value for key, value in both.items() if value is not None}
