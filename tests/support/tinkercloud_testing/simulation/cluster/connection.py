"""The operator's connections: to the API server, with failures, and to heads."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
from kubernetes.aio import client
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from tinkercloud_crds import labels
from tinkercloud_kube.client import _JSON, _RESOURCES, Client, Event, Query, Verb
from tinkercloud_kube.errors import Unavailable, error_of
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.run.cluster.head_calls import HeadClient
from tinkercloud_testing.simulation.cluster.api_server import ApiError, ApiServer, Json
from tinkercloud_testing.simulation.virtual_time import VirtualLoop

# Namespaces are a part of the paths of all other objects; nobody asks for one.
_KINDS = {plural: kind for kind, (_, plural) in _RESOURCES.items() if kind != "Namespace"}


@dataclass
class Weather:
    """How requests to the API server fare."""

    failing: float = 0.0
    """Share of requests that fail before or after they are executed."""
    is_down: bool = False
    slowest_seconds: float = 0.05


@dataclass
class Write:
    """A write of the operator that has reached the API server."""

    at: float
    what: str


@dataclass
class Network:
    """What all processes of the operator share: the API server, its failures, its log."""

    loop: VirtualLoop
    server: ApiServer
    random: random.Random
    weather: Weather = field(default_factory=Weather)
    writes: list[Write] = field(default_factory=list)
    on_write: Callable[[], object] = lambda: None
    """Called after each write."""
    is_writing: bool = False
    """Whether a write of the operator is being executed."""

    async def request(self, verb: Verb, path: str, body: Manifest | None, media: str) -> Json:
        """Send a request, which may arrive even if its sender is gone.

        Raises:
            KubernetesError: it failed; it may have been executed nevertheless.
        """
        # A name in order of creation, for the order in which tasks end.
        sending = self.loop.create_task(self._deliver(verb, path, body, media))
        sending.add_done_callback(_retrieve)
        return await asyncio.shield(sending)

    async def _deliver(self, verb: Verb, path: str, body: Manifest | None, media: str) -> Json:
        request = f"{verb} {path}"
        await asyncio.sleep(self.random.uniform(0.001, self.weather.slowest_seconds))
        fate = self.random.random() / self.weather.failing if self.weather.failing else 2.0
        if self.weather.is_down or fate < 0.25:
            raise Unavailable(f"Kubernetes does not answer {request}", request=request)
        if fate < 0.6:
            status = self.random.choice([429, 500, 503, 504])
            raise error_of(status, request, b"")
        try:
            answer = self._execute(verb, path, body, media)
        except ApiError as error:
            content = (
                f'{{"kind": "Status", "reason": "{error.reason}", "message": "{error.reason}"}}'
            )
            raise error_of(error.status, f"{request} ({error.message})", content.encode()) from None
        if fate < 1.0:
            await asyncio.sleep(30.0)
            raise Unavailable(f"Kubernetes does not answer {request}: timeout", request=request)
        await asyncio.sleep(self.random.uniform(0.001, 0.01))
        return answer

    def _execute(self, verb: Verb, path: str, body: Manifest | None, media: str) -> Json:
        if path.startswith("/openapi"):
            return {"paths": {}}
        parts = path.strip("/").split("/")
        at = next((index for index, part in enumerate(parts) if part in _KINDS), None)
        if at is None:
            return {"resources": [{"name": plural} for plural in _KINDS]}
        kind, name = _KINDS[parts[at]], "".join(parts[at + 1 : at + 2])
        if verb == "GET":
            return self.server.get(kind, name) if name else self._list(kind)
        part = "status" if parts[-1] == "status" else "spec"
        target = name or (body or {})["metadata"]["name"]
        self.writes.append(Write(self.loop.time(), f"{verb} {part} of {kind} {target}"))
        self.is_writing = True
        try:
            return self._write(verb, kind, name, body or {}, media=media, part=part)
        finally:
            self.is_writing = False
            self.on_write()

    def _list(self, kind: str) -> Json:
        metadata = {"resourceVersion": str(self.server.version)}
        return {"metadata": metadata, "items": self.server.all(kind)}

    def _write(
        self, verb: Verb, kind: str, name: str, body: Manifest, *, media: str, part: str
    ) -> Json:
        if verb == "POST":
            return self.server.create(kind, body)
        if verb == "DELETE":
            return self.server.delete(kind, name, body["preconditions"]["uid"])
        if "merge-patch" in media:
            return self.server.merge(kind, name, body)
        return self.server.apply(kind, body, part)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


class SimulatedClient(Client):
    """The operator's client; requests go to the simulated API server."""

    def __init__(self, network: Network) -> None:
        """Create a client of one process of the operator."""
        nothing = cast("client.ApiClient", None)
        super().__init__(nothing, "default", manager=labels.OPERATOR_FIELD_MANAGER)
        self._network = network

    async def _call(
        self,
        verb: Verb,
        path: str,
        *,
        body: Manifest | None = None,
        query: Query | None = None,
        media: str = _JSON,
    ) -> Json:
        answer = await self._network.request(verb, path, body, media)
        selector = dict(query or []).get("labelSelector")
        if selector is None or "items" not in answer:
            return answer
        chosen = [it for it in answer["items"] if selector in it["metadata"].get("labels", {})]
        return {**answer, "items": chosen}

    async def watch(self, kind: str, version: int, seconds: int) -> AsyncGenerator[Event, None]:
        """Yield changes of a kind's objects for a while."""
        changes: asyncio.Queue[Event] = asyncio.Queue()

        def note(changed: str, event: Any, manifest: Json) -> None:
            if changed == kind:
                changes.put_nowait(Event(event, manifest))

        if self._network.weather.is_down:
            raise Unavailable("Kubernetes does not answer the watch")
        server = self._network.server
        for item in server.all(kind):
            if int(item["metadata"]["resourceVersion"]) > version:
                yield Event("MODIFIED", item)
        server.subscribers.append(note)
        try:
            async with asyncio.timeout(seconds):
                while True:
                    yield await changes.get()
        except TimeoutError:
            return
        finally:
            server.subscribers.remove(note)


class HeadRefused(Exception):
    """A head answers with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class HeadUnreachable(Exception):
    """No head answers."""


class SimulatedHeadClient(HeadClient):
    """The operator's client of heads; requests go to simulated ones."""

    def __init__(self, cluster: Client, answer: Callable[[str, str, str], Any]) -> None:
        """Create a client.

        Args:
            cluster: the Kubernetes API.
            answer: called with method, name of the session and path; returns the body, awaitable.
        """
        super().__init__(cluster, cast("aiohttp.ClientSession", None))
        self._answer = answer

    async def _call(self, method: str, url: str, token: str, body: bytes | None = None) -> bytes:
        assert token
        at = URL(url)
        session = str(at.host).partition(".")[0].removesuffix("-head")
        try:
            content: bytes = await self._answer(method, session, at.path)
        except HeadUnreachable as error:
            raise aiohttp.ClientConnectionError(str(error)) from None
        except HeadRefused as error:
            headers: CIMultiDict[str] = CIMultiDict()
            request = aiohttp.RequestInfo(at, method, CIMultiDictProxy(headers), at)
            raise aiohttp.ClientResponseError(
                request, (), status=error.status, message=error.message
            ) from None
        return content
