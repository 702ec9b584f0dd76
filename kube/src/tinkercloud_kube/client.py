"""An asynchronous client of the Kubernetes API for one namespace, or all: JSON in, JSON out.

Every method raises a `KubernetesError`; `tinkercloud_kube.errors` lists them.
"""

import base64
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

import aiohttp
import yaml
from kubernetes.aio import client, config
from kubernetes.aio.client.rest import RESTResponse

from tinkercloud_crds import labels
from tinkercloud_kube.errors import (
    KubernetesError,
    NoCredentials,
    NotFound,
    NotLeading,
    Unavailable,
    error_of,
)
from tinkercloud_kube.objects import Manifest

Json = dict[str, Any]
Verb = Literal["GET", "POST", "PATCH", "DELETE"]
Query = list[tuple[str, str]]

_CONNECT_SECONDS = 5.0
_PAGE_SIZE = 250
"""Objects in one page of a list: a page of pods takes some megabytes while it is parsed."""
_DEAD_STREAM_SECONDS = 10
"""How long after its announced end a silent watch is considered dead."""
_SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"

_RESOURCES: Mapping[str, tuple[str, str]] = {
    "BaseModel": (f"apis/{labels.API_VERSION}", labels.BASE_MODELS),
    "TrainingSession": (f"apis/{labels.API_VERSION}", labels.TRAINING_SESSIONS),
    "Tenant": (f"apis/{labels.API_VERSION}", labels.TENANTS),
    "RayCluster": ("apis/ray.io/v1", "rayclusters"),
    "Pod": ("api/v1", "pods"),
    "Node": ("api/v1", "nodes"),
    "Service": ("api/v1", "services"),
    "Secret": ("api/v1", "secrets"),
    "ConfigMap": ("api/v1", "configmaps"),
    "Event": ("api/v1", "events"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "Job": ("apis/batch/v1", "jobs"),
    "ResourceClaimTemplate": ("apis/resource.k8s.io/v1", "resourceclaimtemplates"),
    "Deployment": ("apis/apps/v1", "deployments"),
    "LocalQueue": ("apis/kueue.x-k8s.io/v1beta2", "localqueues"),
    "Namespace": ("api/v1", "namespaces"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "SelfSubjectAccessReview": ("apis/authorization.k8s.io/v1", "selfsubjectaccessreviews"),
    "StorageClass": ("apis/storage.k8s.io/v1", "storageclasses"),
}
"""API and plural of every kind that is read or written."""
_CLUSTER_WIDE = frozenset({"Namespace", "Node", "SelfSubjectAccessReview", "StorageClass"})


@dataclass(frozen=True, slots=True)
class Page:
    """Some or all objects of a kind at one moment."""

    items: list[Json]
    version: int
    """Resource version of that moment."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change of one object. A bookmark only reports the resource version."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Json


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Names one object of the client's namespace."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class _Request:
    verb: Verb
    path: str
    query: Query
    body: Manifest | None = None
    media: str = _JSON

    def __str__(self) -> str:
        return f"{self.verb} {self.path}"


async def credentials() -> client.Configuration:
    """Read credentials: the pod's service account, or else the kubeconfig that KUBECONFIG names.

    Raises:
        NoCredentials: there are none, or they cannot be read.
    """
    # By default aiohttp reads a netrc file and the environment for every request.
    configuration = client.Configuration(client_session_kwargs={"trust_env": False})
    try:
        if _runs_in_a_pod():
            config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                os.environ.get("KUBECONFIG"), client_configuration=configuration
            )
    # A file that is no mapping, such as an empty one, is a TypeError.
    except (config.ConfigException, OSError, TypeError, yaml.YAMLError) as error:
        raise NoCredentials(
            "there are no credentials for a Kubernetes cluster: run in a pod with a service"
            f" account, or set KUBECONFIG to the path of a kubeconfig: {error}"
        ) from None
    return configuration


def _runs_in_a_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and _SERVICE_ACCOUNT_TOKEN.exists()


class Client:
    """A client of one namespace. Belongs to one event loop."""

    def __init__(
        self,
        api: client.ApiClient,
        namespace: str,
        *,
        manager: str,
        timeout_seconds: float = 15.0,
        may_send: Callable[[], bool] = lambda: True,
        count: Callable[[str, str], None] = lambda _verb, _code: None,
    ) -> None:
        """Wrap a connection.

        Args:
            api: sends the requests.
            namespace: of all objects; empty to list the objects of all namespaces.
            manager: field manager of writes.
            timeout_seconds: limit of one request; watches have their own.
            may_send: called before every request; nothing is sent while it returns False.
            count: called after every request other than a watch, with its verb and the status of
                the answer; the status is `none` if there was no answer.
        """
        self.namespace = namespace
        self._api = api
        self._manager = manager
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=_CONNECT_SECONDS)
        self._may_send = may_send
        self._count = count

    @classmethod
    async def connect(cls, namespace: str, manager: str) -> "Client":
        """Return a client with the credentials of the environment; it owns its connections.

        Raises:
            NoCredentials: there are none, or they cannot be read.
        """
        return cls(client.ApiClient(await credentials()), namespace, manager=manager)

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()  # type: ignore[no-untyped-call]

    @property
    def url(self) -> str:
        """The URL of the API server."""
        return str(self._api.configuration.host)

    def in_all_namespaces(self) -> "Client":
        """Return a client that lists the objects of all namespaces, with the same connections."""
        return Client(self._api, "", manager=self._manager)

    async def version(self) -> str:
        """Return the version of the API server, such as `v1.36.4`."""
        answer = await self._call("GET", "/version")
        return str(answer["gitVersion"])

    async def pages(self, kind: str, label_selector: str = "") -> AsyncIterator[Page]:
        """Yield all selected objects of a kind, page by page; all pages show the same moment.

        Raises:
            Expired: reading the pages took too long; start again.
        """
        query = [("limit", str(_PAGE_SIZE))]
        if label_selector:
            query.append(("labelSelector", label_selector))
        token: str | None = ""
        while token is not None:
            page_query = [*query, ("continue", token)] if token else query
            answer = await self._call("GET", self._path(kind), query=page_query)
            metadata = answer["metadata"]
            yield Page(answer.get("items", []), int(metadata["resourceVersion"]))
            token = metadata.get("continue") or None

    async def list_all(self, kind: str) -> Page:
        """Return all objects of a kind.

        Raises:
            Expired: reading the pages took too long; start again.
        """
        items: list[Json] = []
        version = 0
        async for page in self.pages(kind):
            items += page.items
            version = page.version
        return Page(items, version)

    async def watch(self, kind: str, version: int, seconds: int) -> AsyncGenerator[Event, None]:
        """Yield changes of a kind's objects, until Kubernetes ends the stream.

        Args:
            kind: of the objects.
            version: resource version to start from.
            seconds: how long Kubernetes keeps the stream open.

        Raises:
            Unavailable: the connection broke, or has been silent for too long.
            Expired: it is not possible to continue from this resource version.
        """
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", str(version)),
            ("timeoutSeconds", str(seconds)),
        ]
        timeout = aiohttp.ClientTimeout(
            sock_connect=_CONNECT_SECONDS, sock_read=seconds + _DEAD_STREAM_SECONDS
        )
        request = _Request("GET", self._path(kind), query)
        try:
            answer = await self._send(request, timeout)
            async with answer.response as stream:
                if stream.status != 200:
                    raise error_of(stream.status, str(request), await stream.read())
                while line := await stream.content.readline():
                    yield _event(line, request)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(request, error) from error

    async def get(self, ref: ObjectRef) -> Json:
        """Return one object.

        Raises:
            NotFound: it does not exist.
        """
        return await self._call("GET", self._path(ref.kind, ref.name))

    async def find(self, ref: ObjectRef) -> Json | None:
        """Return one object, or None if it does not exist."""
        try:
            return await self.get(ref)
        except NotFound:
            return None

    async def secret(self, name: str) -> Mapping[str, bytes]:
        """Return the decoded entries of a Secret, none if it does not exist."""
        found = await self.find(ObjectRef("Secret", name)) or {}
        return {key: base64.b64decode(value) for key, value in found.get("data", {}).items()}

    async def apply(self, manifest: Manifest) -> Json:
        """Create or change an object so that it matches the manifest (server-side apply)."""
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        return await self._apply(path, manifest)

    async def apply_status(self, manifest: Manifest) -> Json:
        """Change the status of an object to match the manifest (server-side apply).

        Raises:
            NotFound: the object does not exist.
        """
        path = self._path(manifest["kind"], manifest["metadata"]["name"])
        return await self._apply(f"{path}/status", manifest)

    async def merge(self, ref: ObjectRef, patch: Manifest) -> Json:
        """Change fields of an object, also fields that others own (JSON merge patch).

        Raises:
            NotFound: the object does not exist.
            Conflict: the patch names a resource version that is not the object's.
        """
        path, query = self._path(ref.kind, ref.name), [("fieldManager", self._manager)]
        return await self._call("PATCH", path, body=patch, query=query, media=_MERGE)

    async def create(self, manifest: Manifest, *, is_strict: bool = False) -> Json:
        """Create an object.

        Args:
            manifest: the object.
            is_strict: whether fields that the definition does not declare are errors; otherwise
                Kubernetes drops them.

        Raises:
            AlreadyExists: an object of that name exists.
            Conflict: another object changed in the meantime, for example a ResourceQuota.
        """
        query = [("fieldManager", self._manager)]
        if is_strict:
            query.append(("fieldValidation", "Strict"))
        return await self._call("POST", self._path(manifest["kind"]), body=manifest, query=query)

    async def delete(self, ref: ObjectRef, uid: str) -> None:
        """Delete an object and, in the background, its dependents; a missing one is fine.

        Args:
            ref: the object.
            uid: its uid, so that a late request does not delete a newer object of that name.

        Raises:
            Conflict: the object of that name has another uid.
        """
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            await self._call("DELETE", self._path(ref.kind, ref.name), body=body)
        except NotFound:
            return

    async def log(self, pod: str, lines: int) -> bytes:
        """Return the last lines of the output of a pod's only container.

        Raises:
            NotFound: the pod does not exist.
            Rejected: it has not started.
        """
        path, query = f"{self._path('Pod', pod)}/log", [("tailLines", str(lines))]
        return await self._content(_Request("GET", path, query))

    async def serves(self, kind: str) -> bool:
        """Return whether the API server knows a kind."""
        api, plural = _RESOURCES[kind]
        try:
            answer = await self._call("GET", f"/{api}")
        except NotFound:
            return False
        return any(resource["name"] == plural for resource in answer["resources"])

    async def openapi_editions(self) -> dict[str, str]:
        """Return the address of each API's OpenAPI document, by API such as `apis/ray.io/v1`.

        The address contains a hash, so a document that changes gets another address.
        """
        answer = await self._call("GET", "/openapi/v3")
        return {api: found["serverRelativeURL"] for api, found in answer["paths"].items()}

    async def openapi(self, edition: str) -> Json:
        """Return the OpenAPI document at one of those addresses."""
        path, _, query = edition.partition("?")
        return await self._call("GET", path, query=parse_qsl(query))

    def _path(self, kind: str, name: str = "") -> str:
        api, plural = _RESOURCES[kind]
        is_wide = kind in _CLUSTER_WIDE or not self.namespace
        place = "" if is_wide else f"/namespaces/{self.namespace}"
        return f"/{api}{place}/{plural}" + (f"/{name}" if name else "")

    async def _apply(self, path: str, manifest: Manifest) -> Json:
        query = [("fieldManager", self._manager), ("force", "true")]
        return await self._call("PATCH", path, body=manifest, query=query, media=_APPLY)

    async def _call(
        self,
        verb: Verb,
        path: str,
        *,
        body: Manifest | None = None,
        query: Query | None = None,
        media: str = _JSON,
    ) -> Json:
        content = await self._content(_Request(verb, path, query or [], body, media))
        decoded: Json = json.loads(content)
        return decoded

    async def _content(self, request: _Request) -> bytes:
        """Send a request and return the content of a successful answer."""
        try:
            answer = await self._send(request, self._timeout)
            async with answer.response as response:
                content: bytes = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._count(request.verb, "none")
            raise _no_answer(request, error) from error
        self._count(request.verb, str(response.status))
        if response.status >= 300:
            raise error_of(response.status, str(request), content)
        return content

    async def _send(self, request: _Request, limits: aiohttp.ClientTimeout) -> RESTResponse:
        if not self._may_send():
            raise NotLeading(f"{request}: the Lease is not held", request=str(request))
        verb, url, headers, content, _ = await self._api.param_serialize(
            request.verb,
            request.path,
            query_params=request.query,
            header_params={"Accept": _JSON, "Content-Type": request.media},
            body=request.body,
            auth_settings=["BearerToken"],
        )
        return await self._api.call_api(
            verb, url, header_params=headers, body=content, _request_timeout=limits
        )


def _no_answer(request: _Request, error: Exception) -> Unavailable:
    what = str(error) or type(error).__name__
    return Unavailable(f"Kubernetes does not answer {request}: {what}", request=str(request))


def _event(line: bytes, request: _Request) -> Event:
    content = json.loads(line)
    if content["type"] == "ERROR":
        raise _stream_error(content["object"], request)
    return Event(content["type"], content["object"])


def _stream_error(status: Json, request: _Request) -> KubernetesError:
    """Return the error that ends a watch: a Status object, whose code is the HTTP status."""
    return error_of(int(status.get("code", 500)), str(request), json.dumps(status).encode())
