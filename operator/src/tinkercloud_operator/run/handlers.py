"""The kopf handlers: which objects are watched, and how. They only record events."""

import asyncio
from collections.abc import Callable
from typing import Any

import kopf

from tinkercloud_crds import labels
from tinkercloud_operator.run.controller import Controller
from tinkercloud_operator.settings import Settings

_OWN = {
    "TrainingSession": (labels.GROUP, labels.VERSION, labels.TRAINING_SESSIONS),
    "BaseModel": (labels.GROUP, labels.VERSION, labels.BASE_MODELS),
    "Tenant": (labels.GROUP, labels.VERSION, labels.TENANTS),
}
_CHILDREN = {
    "RayCluster": ("ray.io", "v1", "rayclusters"),
    "Pod": ("", "v1", "pods"),
    "Service": ("", "v1", "services"),
    "ConfigMap": ("", "v1", "configmaps"),
    "NetworkPolicy": ("networking.k8s.io", "v1", "networkpolicies"),
    "PodDisruptionBudget": ("policy", "v1", "poddisruptionbudgets"),
    "ResourceClaimTemplate": ("resource.k8s.io", "v1", "resourceclaimtemplates"),
    "Job": ("batch", "v1", "jobs"),
}
_LEASE = ("coordination.k8s.io", "v1", "leases")


class WatchingFailed(Exception):
    """The watches ended: the API server sent a response that kopf does not recover from."""


async def watch(
    controller: Controller,
    settings: Settings,
    *,
    on_heartbeat: Callable[[], None],
    on_started: Callable[[], None],
    stop: asyncio.Event,
) -> None:
    """Watch until `stop` is set.

    Args:
        controller: receives every event.
        settings: settings of the operator.
        on_heartbeat: called for every event of the operator's own Lease, which is renewed every few
            seconds: as long as the events arrive, watches work.
        on_started: called once the watches are being opened.
        stop: ends the watches.

    Raises:
        WatchingFailed: the watches ended early; list and watch everything again.
    """
    started = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(_call_after(started, on_started))
        try:
            await kopf.operator(
                registry=_registry(controller, on_heartbeat),
                settings=_kopf_settings(settings),
                namespaces=[settings.namespace],
                standalone=True,
                ready_flag=started,
                stop_flag=stop,
            )
        except Exception as error:
            raise WatchingFailed(f"{type(error).__name__}: {error}") from error
        if not stop.is_set():
            raise WatchingFailed("the watches ended without an error")
        waiting.cancel()


async def _call_after(event: asyncio.Event, function: Callable[[], None]) -> None:
    await event.wait()
    function()


def _registry(controller: Controller, on_heartbeat: Callable[[], None]) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()
    for kind, resource in {**_OWN, **_CHILDREN}.items():
        _register(registry, controller, kind, resource)

    @kopf.on.login(registry=registry)
    def login(**arguments: Any) -> object:  # noqa: ANN401 - kopf's
        in_cluster = kopf.login_with_service_account(**arguments)
        return in_cluster or kopf.login_with_kubeconfig(**arguments)

    @kopf.on.event(*_LEASE, registry=registry)
    async def on_lease(**_: object) -> None:
        on_heartbeat()

    return registry


def _register(
    registry: kopf.OperatorRegistry,
    controller: Controller,
    kind: str,
    resource: tuple[str, str, str],
) -> None:
    @kopf.on.event(*resource, id=f"note-{kind.lower()}", registry=registry)
    async def note(event: kopf.RawEvent, **_: object) -> None:
        controller.on_event(kind, event["type"], event["object"])


def _kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    chosen = kopf.OperatorSettings()
    # Without lists of CRDs and namespaces, the operator needs no rights outside its namespace.
    chosen.scanning.disabled = True
    chosen.posting.enabled = False
    chosen.watching.server_timeout = 300
    chosen.watching.client_timeout = 310
    chosen.watching.connect_timeout = 30
    chosen.watching.chunk_size = 250
    # Retry forever during an outage.
    chosen.networking.error_backoffs = _Backoffs()
    # Every object has its own worker, which only records events: any number may run, and there is
    # no need to keep idle workers or to wait for them at exit.
    chosen.queueing.worker_limit = None
    chosen.queueing.idle_timeout = 0.5
    chosen.queueing.exit_timeout = 0.1
    for resource in _CHILDREN.values():
        chosen.watching.label_selectors[resource] = labels.SESSION_LABEL
    # Also pods of programs, which are not the session's own.
    chosen.watching.label_selectors[_CHILDREN["Pod"]] = labels.COMPONENT_LABEL
    chosen.persistence.diffbase_storage = _NoEssence()
    chosen.persistence.progress_storage = _NoProgress()
    chosen.watching.field_selectors[_LEASE] = f"metadata.name={settings.lease_name}"
    return chosen


class _Backoffs:
    """An endless sequence of backoff intervals, restarted for every request."""

    def __iter__(self) -> "_Backoffs":
        return _Backoffs()

    def __init__(self) -> None:
        self._next = 0.25

    def __next__(self) -> float:
        self._next = min(self._next * 2, 10.0)
        return self._next


class _NoEssence(kopf.DiffBaseStorage):
    """Keeps no copies of objects for comparison, which would dominate memory use."""

    def build(self, **_: object) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: object) -> None:
        return None

    def store(self, **_: object) -> None:
        return


class _NoProgress(kopf.ProgressStorage):
    """Keeps no handler progress: handlers only record events and have no state."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence

    def fetch(self, **_: object) -> None:
        return None

    def store(self, **_: object) -> None:
        return

    def purge(self, **_: object) -> None:
        return

    def touch(self, **_: object) -> None:
        return
