"""What the API server asks of Kubernetes: custom resources and session tokens of one namespace.

The only module that knows a Kubernetes client. Objects are plain dictionaries here.
"""

import base64
import json
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.rest import RESTResponse

from tinkercloud_crds import labels
from tinkercloud_protocol.errors import WireError

Manifest = Mapping[str, Any]

_CALL_SECONDS = 15.0
_CONNECT_SECONDS = 5.0
_PAGE_SIZE = 500
_DEAD_STREAM_SECONDS = 10
"""How long after its announced end a watch that says nothing is taken for dead."""
_SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"


class ClusterUnreachable(Exception):
    """Kubernetes does not answer, or not now: the same call may succeed later."""


class ResourceVersionGone(Exception):
    """A watch can't go on from where it was: everything must be listed again (410)."""


class ClusterRefused(WireError):
    """Kubernetes refuses a call for good; the message says what to change."""

    status = 503


class ClusterRefusedRequest(ClusterRefused):
    """Kubernetes refuses what the client asked for; the message names the field."""

    status = 400
    category = "user"


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects of a kind at one moment."""

    items: list[Manifest]
    resource_version: str


@dataclass(frozen=True, slots=True)
class Event:
    """A change of one object. A bookmark only tells the resource version."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Manifest


class ClusterApi:
    """One namespace of a cluster. Belongs to one event loop."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._api = api
        self.namespace = namespace

    @classmethod
    async def connect(cls, namespace: str) -> "ClusterApi":
        """Read the credentials: of the pod this runs in, else those KUBECONFIG names.

        Raises:
            ClusterRefused: there are none, or they can't be read.
        """
        # Else a netrc file and the environment are read for every request.
        configuration = client.Configuration(client_session_kwargs={"trust_env": False})
        try:
            if _runs_in_a_pod():
                config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
            else:
                await config.load_kube_config(  # type: ignore[no-untyped-call]
                    os.environ.get("KUBECONFIG"), client_configuration=configuration
                )
        except config.ConfigException as error:
            raise ClusterRefused(
                "provider=kubernetes: there are no credentials of a cluster; run in a pod with a"
                f" service account, or name a kubeconfig by KUBECONFIG: {error}"
            ) from None
        return cls(client.ApiClient(configuration), namespace)

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()  # type: ignore[no-untyped-call]

    async def list_all(self, plural: str) -> Listing:
        """Return all objects of a custom resource.

        Raises:
            ClusterUnreachable: Kubernetes does not answer.
            ClusterRefused: this process may not list them.
            ResourceVersionGone: the list took too long; begin again.
        """
        items: list[Manifest] = []
        token = ""
        while True:
            query = [("limit", str(_PAGE_SIZE)), *([("continue", token)] if token else [])]
            page = await self._call("GET", self._path(plural), query=query)
            items += page.get("items", [])
            token = page["metadata"].get("continue", "")
            if not token:
                return Listing(items, page["metadata"]["resourceVersion"])

    async def watch(
        self, plural: str, resource_version: str, seconds: int
    ) -> AsyncGenerator[Event, None]:
        """Yield changes of a custom resource's objects, until Kubernetes ends the stream.

        Args:
            plural: the resource.
            resource_version: where to begin.
            seconds: after how long Kubernetes ends the stream.

        Raises:
            ClusterUnreachable: the connection broke, or has been silent for too long.
            ClusterRefused: this process may not watch them.
            ResourceVersionGone: there is no way to continue from there.
        """
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", resource_version),
            ("timeoutSeconds", str(seconds)),
        ]
        patience = aiohttp.ClientTimeout(
            sock_connect=_CONNECT_SECONDS, sock_read=seconds + _DEAD_STREAM_SECONDS
        )
        try:
            answer = await self._send(_Request("GET", self._path(plural), query), patience)
            async with answer.response as stream:
                if stream.status != 200:
                    raise _error(stream.status, await stream.read(), f"watch {plural}")
                while line := await stream.content.readline():
                    yield _event(line, plural)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = str(error) or type(error).__name__
            raise ClusterUnreachable(f"watch of {plural}: {what}") from None

    async def get(self, plural: str, name: str) -> Manifest | None:
        """Return an object; None if there is none.

        Raises:
            ClusterUnreachable: Kubernetes does not answer.
            ClusterRefused: this process may not read it.
        """
        try:
            return await self._call("GET", self._path(plural, name))
        except _Missing:
            return None

    async def create(self, plural: str, manifest: Manifest) -> None:
        """Create an object, unless there is one of its name.

        Raises:
            ClusterUnreachable: Kubernetes does not answer.
            ClusterRefused: it may not be created.
        """
        query = [("fieldManager", labels.API_FIELD_MANAGER), ("fieldValidation", "Strict")]
        try:
            await self._call("POST", self._path(plural), query=query, body=manifest)
        except _Exists:
            return
        except _Conflict as error:
            # As of ResourceQuotas, when many objects are created at once.
            raise ClusterUnreachable(str(error)) from None

    async def annotate(self, plural: str, name: str, annotations: Mapping[str, str]) -> None:
        """Set annotations of an object, if it exists.

        Raises:
            ClusterUnreachable: Kubernetes does not answer.
            ClusterRefused: this process may not patch it.
        """
        query = [("fieldManager", labels.API_FIELD_MANAGER)]
        patch = {"metadata": {"annotations": dict(annotations)}}
        try:
            await self._call(
                "PATCH", self._path(plural, name), query=query, body=patch, media=_MERGE_PATCH
            )
        except _Missing:
            return

    async def delete(self, plural: str, name: str, uid: str) -> None:
        """Delete an object, if it is still there; its finalizers run afterwards.

        Args:
            plural: the resource.
            name: the object.
            uid: its uid: one that was made again under the same name is not meant.

        Raises:
            ClusterUnreachable: Kubernetes does not answer.
            ClusterRefused: this process may not delete it.
        """
        options = {"preconditions": {"uid": uid}}
        try:
            await self._call("DELETE", self._path(plural, name), body=options)
        except (_Missing, _Conflict):
            return

    async def secret(self, name: str) -> Mapping[str, bytes]:
        """Return the entries of a Secret; none if it does not exist.

        Raises:
            ClusterUnreachable: Kubernetes does not answer.
            ClusterRefused: this process may not read it.
        """
        try:
            path = f"/api/v1/namespaces/{self.namespace}/secrets/{name}"
            found = await self._call("GET", path)
        except _Missing:
            return {}
        return {key: base64.b64decode(value) for key, value in found.get("data", {}).items()}

    def _path(self, plural: str, name: str | None = None) -> str:
        path = f"/apis/{labels.API_VERSION}/namespaces/{self.namespace}/{plural}"
        return path if name is None else f"{path}/{name}"

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: list[tuple[str, str]] | None = None,
        body: Manifest | None = None,
        media: str = _JSON,
    ) -> dict[str, Any]:
        request = _Request(method, path, query or [], body, media)
        patience = aiohttp.ClientTimeout(total=_CALL_SECONDS, sock_connect=_CONNECT_SECONDS)
        try:
            answer = await self._send(request, patience)
            async with answer.response as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = str(error) or type(error).__name__
            raise ClusterUnreachable(f"Kubernetes does not answer: {what}") from None
        if response.status >= 400:
            raise _error(response.status, content, f"{method} {path}")
        decoded: dict[str, Any] = json.loads(content)
        return decoded

    async def _send(self, request: "_Request", patience: aiohttp.ClientTimeout) -> RESTResponse:
        _, url, headers, content, _ = await self._api.param_serialize(
            request.method,
            request.path,
            query_params=request.query,
            header_params={"Accept": _JSON, "Content-Type": request.media},
            body=request.body,
            auth_settings=["BearerToken"],
        )
        return await self._api.call_api(
            request.method, url, header_params=headers, body=content, _request_timeout=patience
        )


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    query: list[tuple[str, str]]
    body: Manifest | None = None
    media: str = _JSON


class _Missing(ClusterRefused):
    """404."""


class _Conflict(ClusterRefused):
    """409: it, or something else that has to do with it, has changed meanwhile."""


class _Exists(_Conflict):
    """409: there is an object of that name."""


def _runs_in_a_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and _SERVICE_ACCOUNT_TOKEN.exists()


def _event(line: bytes, plural: str) -> Event:
    content = json.loads(line)
    if content["type"] == "ERROR":
        status = content["object"]
        raise _error(int(status.get("code", 500)), json.dumps(status).encode(), f"watch {plural}")
    return Event(content["type"], content["object"])


def _error(status: int, content: bytes, what: str) -> Exception:
    """Return what a refusal means."""
    try:
        said = json.loads(content)
        message, reason = str(said["message"]), said.get("reason")
    except (ValueError, KeyError, TypeError):
        message, reason = content[:200].decode(errors="replace"), None
    if status == 410:
        return ResourceVersionGone(message)
    if status in {401, 429} or status >= 500:  # 401: the token has just been renewed
        return ClusterUnreachable(f"{what}: {status}: {message}")
    if status == 404:
        return _Missing(message)
    if status == 409:
        return (_Exists if reason == "AlreadyExists" else _Conflict)(message)
    if status in {400, 422}:
        return ClusterRefusedRequest(f"Kubernetes does not accept this session: {message}")
    return ClusterRefused(f"Kubernetes refuses {what} ({status}): {message}{_remedy(message)}")


def _remedy(message: str) -> str:
    """Return what to do about a refusal; the message of an admission policy says so itself."""
    if "exceeded quota" in message:
        return "; finish other sessions, or have the namespace's ResourceQuota raised"
    if " cannot " in message:
        return "; give the API server's service account the Role of the chart"
    return ""
