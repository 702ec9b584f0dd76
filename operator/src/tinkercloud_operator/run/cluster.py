"""The Kubernetes API as the operator needs it: JSON in, JSON out, errors by what to do about them.

ClusterError
  Unreachable        no answer, or one that says try again (401, 429, 5xx)
  NotLeading         nothing was asked: another replica may hold the Lease
  Conflict           409: it changed meanwhile, look again
  NotThere           404
  Refused            every other 4xx, and a field that no definition declares, which is answered
                     500: trying the same again won't help
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

import aiohttp
from kubernetes.aio import client

from tinkercloud_crds import labels
from tinkercloud_operator import metrics
from tinkercloud_operator.decide.definitions import is_undeclared
from tinkercloud_operator.spec.snapshot import Manifest

Json = dict[str, Any]

_TIMEOUT_SECONDS = 30
_PAGE_SIZE = 250
"""Objects that are listed at a time: a page of pods takes some megabytes while it is read."""
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_MANAGER = labels.OPERATOR_FIELD_MANAGER
_MAX_MESSAGE_LENGTH = 512
"""Of the API server's answers, so that nothing secret in them travels far."""

_PLURALS: Mapping[str, tuple[str, str]] = {
    "BaseModel": (f"apis/{labels.API_VERSION}", labels.BASE_MODELS),
    "TrainingSession": (f"apis/{labels.API_VERSION}", labels.TRAINING_SESSIONS),
    "RayCluster": ("apis/ray.io/v1", "rayclusters"),
    "Pod": ("api/v1", "pods"),
    "Node": ("api/v1", "nodes"),
    "Service": ("api/v1", "services"),
    "Secret": ("api/v1", "secrets"),
    "ConfigMap": ("api/v1", "configmaps"),
    "Event": ("api/v1", "events"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "ResourceClaimTemplate": ("apis/resource.k8s.io/v1", "resourceclaimtemplates"),
}
"""Every kind that is read or written: API and plural."""
_CLUSTER_WIDE = frozenset({"Node"})


class ClusterError(Exception):
    """The Kubernetes API did not do what it was asked."""


class Unreachable(ClusterError):
    """No answer, or one that says to try again later."""


class NotLeading(ClusterError):
    """Another replica may hold the Lease by now, so nothing was asked."""


class Conflict(ClusterError):
    """The object changed meanwhile, or exists already."""


class NotThere(ClusterError):
    """The object does not exist."""


class Refused(ClusterError):
    """The request is not accepted, now or later."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Objects of a kind at one moment: some of them, or all."""

    items: list[Json]
    version: int
    """Resource version of the moment."""


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Names one object of the operator's namespace."""

    kind: str
    name: str


class Cluster:
    """A connection to the Kubernetes API. Belongs to one event loop.

    Args:
        api: what sends the requests.
        namespace: where all objects are.
        may_act: asked before every request whether this replica still leads.
    """

    def __init__(self, api: client.ApiClient, namespace: str, may_act: Callable[[], bool]) -> None:
        self._api = api
        self._namespace = namespace
        self._may_act = may_act

    async def pages(
        self, kind: str, label_selector: str = "", field_selector: str = ""
    ) -> AsyncIterator[Listed]:
        """Yield all objects of a kind that are selected, some at a time; they are of one moment.

        Raises:
            ClusterError: see the module.
        """
        query = [("limit", str(_PAGE_SIZE))]
        if field_selector:
            query.append(("fieldSelector", field_selector))
        if label_selector:
            query.append(("labelSelector", label_selector))
        following: str | None = ""
        while following is not None:
            asked = [*query, ("continue", following)] if following else query
            answer = await self._call("GET", self._path(kind), query=asked)
            metadata = answer["metadata"]
            yield Listed(answer["items"], int(metadata["resourceVersion"]))
            following = metadata.get("continue") or None

    async def get(self, ref: ObjectRef) -> Json:
        """Return one object.

        Raises:
            ClusterError: see the module.
        """
        return await self._call("GET", self._path(ref.kind, ref.name))

    async def apply(self, manifest: Manifest) -> Json:
        """Make an object be as the manifest says (server-side apply).

        Raises:
            ClusterError: see the module.
        """
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        return await self._apply(path, manifest)

    async def apply_status(self, manifest: Manifest) -> Json:
        """Make the status of an object, which must exist, be as the manifest says.

        Raises:
            ClusterError: see the module.
        """
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        return await self._apply(f"{path}/status", manifest)

    async def merge(self, ref: ObjectRef, patch: Manifest) -> Json:
        """Change fields of an object, whoever set them (JSON merge patch); it must exist.

        Raises:
            Conflict: it is not of the resource version that the patch names, if it names one.
            ClusterError: see the module.
        """
        path, query = self._path(ref.kind, ref.name), [("fieldManager", _MANAGER)]
        return await self._call("PATCH", path, body=patch, query=query, content_type=_MERGE)

    async def create(self, manifest: Manifest) -> Json:
        """Create an object.

        Raises:
            Conflict: there is one of that name.
            ClusterError: see the module.
        """
        return await self._call("POST", self._path(manifest["kind"]), body=manifest)

    async def delete(self, ref: ObjectRef, uid: str) -> None:
        """Delete an object and, in the background, what it owns. A missing one is fine.

        Args:
            ref: the object.
            uid: its uid. A request may arrive late: one made again since is not meant.

        Raises:
            Conflict: there is another one of its name.
            ClusterError: see the module.
        """
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            await self._call("DELETE", self._path(ref.kind, ref.name), body=body)
        except NotThere:
            return

    async def serves(self, kind: str) -> bool:
        """Whether the API server knows a kind.

        Raises:
            ClusterError: see the module.
        """
        api, plural = _PLURALS[kind]
        try:
            answer = await self._call("GET", f"/{api}")
        except NotThere:
            return False
        return any(resource["name"] == plural for resource in answer["resources"])

    async def openapi_editions(self) -> dict[str, str]:
        """Return, by API such as `apis/ray.io/v1`, where its OpenAPI document is.

        A document that changes is somewhere else: its address has a hash.

        Raises:
            ClusterError: see the module.
        """
        answer = await self._call("GET", "/openapi/v3")
        return {api: found["serverRelativeURL"] for api, found in answer["paths"].items()}

    async def openapi(self, edition: str) -> Json:
        """Return one of those documents.

        Raises:
            ClusterError: see the module.
        """
        path, _, query = edition.partition("?")
        return await self._call("GET", path, query=parse_qsl(query))

    def _path(self, kind: str, name: str = "") -> str:
        api, plural = _PLURALS[kind]
        place = "" if kind in _CLUSTER_WIDE else f"/namespaces/{self._namespace}"
        return f"/{api}{place}/{plural}" + (f"/{name}" if name else "")

    async def _apply(self, path: str, manifest: Manifest) -> Json:
        query = [("fieldManager", _MANAGER), ("force", "true")]
        return await self._call("PATCH", path, body=manifest, query=query, content_type=_APPLY)

    async def _call(
        self,
        verb: Literal["GET", "POST", "PATCH", "DELETE"],
        path: str,
        *,
        body: Manifest | None = None,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        if not self._may_act():
            raise NotLeading(f"{verb} {path}: the Lease is not held")
        headers = {"Accept": "application/json", "Content-Type": content_type}
        try:
            request = await self._api.param_serialize(
                verb,
                path,
                query_params=query,
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._api.call_api(*request, _request_timeout=_TIMEOUT_SECONDS)
            content: bytes = await response.read()  # type: ignore[no-untyped-call]
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            metrics.API_REQUESTS.labels(verb, "none").inc()
            raise Unreachable(f"{verb} {path}: {type(error).__name__}") from error
        metrics.API_REQUESTS.labels(verb, str(response.status)).inc()
        if response.status < 300:
            answer: Json = json.loads(content)
            return answer
        raise _error(response.status, f"{verb} {path}", content)


def _error(status: int, what: str, content: bytes) -> ClusterError:
    message = f"{what}: {status} {_message(content)}"
    # Of a field that a definition does not declare, the API server says 500 however often it is
    # asked. 401: the token has just been renewed, or the API server has just begun.
    if is_undeclared(message):
        return Refused(message)
    if status in {401, 429} or status >= 500:
        return Unreachable(message)
    return {404: NotThere, 409: Conflict}.get(status, Refused)(message)


def _message(content: bytes) -> str:
    """Return what a Status object says; nothing of what is no Status."""
    try:
        answer = json.loads(content)
    except ValueError:
        return ""
    if not isinstance(answer, dict) or answer.get("kind") != "Status":
        return ""
    return str(answer.get("message", ""))[:_MAX_MESSAGE_LENGTH]
