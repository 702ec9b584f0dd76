"""An in-memory API server, for tests of the requests that the operator sends.

It stores, lists, watches, applies, rejects and deletes objects. It validates nothing, and no
controller acts on the objects: tests of that need a control plane.
"""

import asyncio
import contextlib
import copy
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from kubernetes.aio import client

from tinkercloud_crds import labels
from tinkercloud_kube.client import Client

Json = dict[str, Any]
MOMENT = "2026-01-01T12:00:00Z"
_KINDS = {
    "api/v1": {
        "Pod": "pods",
        "Service": "services",
        "ConfigMap": "configmaps",
        "Secret": "secrets",
        "Namespace": "namespaces",
    },
    "apis/tinkercloud.dev/v1alpha1": {
        "TrainingSession": "trainingsessions",
        "BaseModel": "basemodels",
        "Tenant": "tenants",
    },
    "apis/ray.io/v1": {"RayCluster": "rayclusters"},
    "apis/networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "apis/policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "apis/resource.k8s.io/v1": {"ResourceClaimTemplate": "resourceclaimtemplates"},
    "apis/batch/v1": {"Job": "jobs"},
    "apis/coordination.k8s.io/v1": {"Lease": "leases"},
}
"""The plurals of kinds by API. kopf watches nothing where there are no namespaces."""


def path_of(kind: str, name: str) -> str:
    """Return the path of an object in the namespace `default`."""
    [collection] = [
        f"/{api}/namespaces/default/{kinds[kind]}" for api, kinds in _KINDS.items() if kind in kinds
    ]
    return f"{collection}/{name}"


@dataclass
class MemoryApi:
    """The stored objects, the received requests, and the writes to reject."""

    objects: dict[str, Json] = field(default_factory=dict)
    """Objects by path."""
    requests: list[str] = field(default_factory=list)
    """`VERB path` of each request, in order of arrival."""
    refused: dict[str, int] = field(default_factory=dict)
    """The status of the response to writes, by the last segment of the path."""
    explanation: str = "refused by the test"
    """The message of the response to those writes."""
    has_kuberay: bool = True
    """Whether it knows RayClusters."""
    has_device_claims: bool = True
    """Whether it knows ResourceClaimTemplates."""
    has_definitions: bool = True
    """Whether it knows our own resources."""
    openapi: dict[str, Json] = field(default_factory=dict)
    """Schemas by kind for each API, such as `apis/ray.io/v1`; if empty, none is served."""
    is_silent: bool = False
    """Whether requests get no response."""
    executed_writes: float = math.inf
    """Maximum number of writes; others, and requests after them, get no response."""
    _versions: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
    _watches: list[tuple[str, asyncio.Queue[Json]]] = field(default_factory=list)
    """The paths of the watched collections, and the events that have not been sent."""

    @property
    def writes(self) -> list[str]:
        """All requests except GET."""
        return [request for request in self.requests if not request.startswith("GET")]

    def put(self, path: str, manifest: Mapping[str, Any], **metadata: Any) -> Json:
        """Store an object without validation, with the metadata that an API server adds."""
        before = self.objects.get(path, {"metadata": {}})
        name = path.rsplit("/", 1)[1]
        kept = {"name": name, "uid": f"uid-{self._versions()}", "creationTimestamp": MOMENT}
        stored = {**before, **copy.deepcopy(dict(manifest))}
        own = {**kept, **before["metadata"], **stored.get("metadata", {}), **metadata}
        stored["metadata"] = {**own, "resourceVersion": str(self._versions())}
        self._announce("MODIFIED" if path in self.objects else "ADDED", path, stored)
        self.objects[path] = stored
        return stored

    def _announce(self, event: str, path: str, manifest: Json) -> None:
        for collection, events in self._watches:
            if path.rsplit("/", 1)[0] == collection:
                events.put_nowait({"type": event, "object": manifest})

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Respond to a request."""
        path, method = request.path, request.method
        self.requests.append(f"{method} {path}")
        if self.is_silent or len(self.writes) > self.executed_writes:
            await asyncio.Event().wait()
        status = self.refused.get(path.rsplit("/", 1)[1])
        if status is not None and method != "GET":
            return _status(status, self.explanation)
        match method:
            case "GET" if request.query.get("watch") == "true":
                return await self._watch(request)
            case "GET":
                return self._get(path)
            case "POST":
                body = await request.json()
                return self._create(f"{path}/{body['metadata']['name']}", body)
            case "DELETE":
                return self._delete(path, await request.json())
            case _:
                path, manifest = path.removesuffix("/status"), json.loads(await request.read())
                if request.content_type == "application/merge-patch+json" and "spec" in manifest:
                    before = self.objects.get(path, {}).get("spec", {})
                    manifest["spec"] = before | manifest["spec"]
                return self._patch(path, manifest)

    def _create(self, path: str, manifest: Json) -> web.Response:
        if path in self.objects:
            return _status(409, "already exists", "AlreadyExists")
        return web.json_response(self.put(path, manifest), status=201)

    def _patch(self, path: str, manifest: Json) -> web.Response:
        wanted = manifest.get("metadata", {}).get("resourceVersion")
        found = self.objects.get(path, {"metadata": {}})
        if wanted is not None and found["metadata"].get("resourceVersion") != wanted:
            return _status(409, "the object has been modified")
        return web.json_response(self.put(path, manifest))

    def _delete(self, path: str, options: Json) -> web.Response:
        found = self.objects.get(path, {"metadata": {}})
        wanted = options.get("preconditions", {})
        if any(found["metadata"].get(key) != value for key, value in wanted.items()):
            return _status(409, "the precondition does not hold")
        if path in self.objects:
            self._announce("DELETED", path, found)
        return web.json_response(self.objects.pop(path, {}))

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send all changes of a collection until the client disconnects; selectors are ignored."""
        response, events = web.StreamResponse(), asyncio.Queue[Json]()
        await response.prepare(request)
        self._watches.append((request.path, events))
        since = int(request.query["resourceVersion"])
        for path, manifest in self.objects.items():
            is_newer = int(manifest["metadata"]["resourceVersion"]) > since
            if is_newer and path.rsplit("/", 1)[0] == request.path:
                events.put_nowait({"type": "MODIFIED", "object": manifest})
        try:
            while True:
                await response.write(json.dumps(await events.get()).encode() + b"\n")
        finally:
            self._watches.remove((request.path, events))

    def _discover(self, path: str) -> Json | None:
        """Return the answer to a question for APIs or kinds; None if it is none."""
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            apis = [api.split("/")[1:] for api in _KINDS if api.startswith("apis/")]
            versions = {group: {"version": version} for group, version in apis}
            return {
                "groups": [
                    {"name": group, "versions": [version], "preferredVersion": version}
                    for group, version in versions.items()
                ]
            }
        kinds = _KINDS.get(path.strip("/"))
        if kinds is None:
            return None
        verbs = ["list", "watch", "patch"]
        return {
            "resources": [
                {"name": plural, "kind": kind, "singularName": "", "namespaced": True}
                | {"verbs": verbs}
                for kind, plural in kinds.items()
            ]
        }

    def _get(self, path: str) -> web.Response:
        if path in self.objects:
            return web.json_response(self.objects[path])
        if path.startswith("/openapi/v3") and self.openapi:
            return self._get_openapi(path.removeprefix("/openapi/v3").strip("/"))
        if path == "/apis/ray.io/v1" and not self.has_kuberay:
            return web.json_response({"resources": []})
        if path == "/apis/resource.k8s.io/v1" and not self.has_device_claims:
            return _status(404, "not found")
        if path == "/apis/tinkercloud.dev/v1alpha1" and not self.has_definitions:
            return _status(404, "not found")
        if (discovered := self._discover(path)) is not None:
            return web.json_response(discovered)
        items = [item for key, item in self.objects.items() if key.rsplit("/", 1)[0] == path]
        if not items and not path.endswith("s"):
            return _status(404, "not found")
        metadata = {"resourceVersion": str(self._versions())}
        return web.json_response({"metadata": metadata, "items": items})

    def _get_openapi(self, api: str) -> web.Response:
        if not api:
            editions = {
                name: {"serverRelativeURL": f"/openapi/v3/{name}?hash={hash(json.dumps(schemas))}"}
                for name, schemas in self.openapi.items()
            }
            return web.json_response({"paths": editions})
        schemas = {
            kind: {**schema, "x-kubernetes-group-version-kind": [{"kind": kind}]}
            for kind, schema in self.openapi[api].items()
        }
        return web.json_response({"components": {"schemas": schemas}})


def _status(code: int, message: str, reason: str = "Conflict") -> web.Response:
    content = {"kind": "Status", "code": code, "message": message, "reason": reason}
    return web.json_response(content, status=code)


@dataclass(frozen=True)
class Connection:
    """A connection to an in-memory API server."""

    api: MemoryApi
    client: client.ApiClient
    cluster: Client
    """The client of an operator that is the leader."""

    def write_kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig file with which a program reaches the server; return its path."""
        name = "memory"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": self.client.configuration.host}}],
            "users": [{"name": name, "user": {"token": name}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(content))
        return path


@contextlib.asynccontextmanager
async def a_memory_api() -> AsyncIterator[Connection]:
    """Serve an empty API server during a block."""
    api = MemoryApi()
    runner = web.ServerRunner(web.Server(api.answer), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = runner.addresses[0]
    configuration = client.Configuration(host=f"http://{url[0]}:{url[1]}")
    try:
        async with client.ApiClient(configuration) as connection:
            cluster = Client(connection, "default", manager=labels.OPERATOR_FIELD_MANAGER)
            yield Connection(api, connection, cluster)
    finally:
        await runner.cleanup()
