"""A term of leadership: the tasks that run while this replica leads (`WORKERS`)."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from tinkercloud_kube.client import Client
from tinkercloud_kube.errors import KubernetesError
from tinkercloud_operator.run.cluster.head_calls import HeadClient
from tinkercloud_operator.run.controller import Controller, DefinitionsMissing
from tinkercloud_operator.run.handlers import WatchingFailed, watch
from tinkercloud_operator.run.probes import Probes
from tinkercloud_operator.settings import Settings

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0
_GATHER_SECONDS = 2.0
"""Pause before a resync: watches often restart together, and one list serves them all."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A task of a leader; it runs until the watches end."""

    name: str
    """Name of its asyncio tasks."""
    run: Callable[[Controller], Coroutine[Any, Any, None]]
    is_concurrent: bool = False
    """Whether `Settings.max_concurrent` of them run at the same time."""


WORKERS = (
    Worker("reconcile sessions", Controller.work, is_concurrent=True),
    Worker("maintain base models", Controller.work_on_base_models),
    Worker("maintain tenants", Controller.work_on_tenants),
    Worker("maintain pools", Controller.work_on_pools),
    Worker("scale engines", Controller.scale_engines),
    Worker("send save requests", Controller.save_heads),
    Worker("check definitions", Controller.watch_definitions),
    Worker("watch nodes", Controller.watch_nodes),
    Worker("count sessions", Controller.count),
)
"""All workers of a leader. The watches and `resync` run alongside them."""
RESYNC = "list all objects"
"""Name of the task of `resync`."""


async def lead(
    cluster: Client,
    head_client: HeadClient,
    probes: Probes,
    settings: Settings,
    on_started: Callable[[], None],
) -> None:
    """Lead until cancelled; restart the watches when an API is added or removed.

    Args:
        cluster: the connection to Kubernetes.
        head_client: calls heads.
        probes: report whether this replica works.
        settings: settings of the operator.
        on_started: called whenever the watches are being opened.
    """
    while True:
        controller = Controller(cluster, head_client, settings)
        probes.unready = controller.unready
        probes.on_heartbeat()
        try:
            await _watch_and_work(controller, probes, settings, on_started)
        except* WatchingFailed as errors:
            causes = "; ".join(map(str, _single(errors)))
            log.warning("the watches failed; restarting them", error=causes)
        # A task group that failed does not propagate that it was also cancelled.
        this = asyncio.current_task()
        if this is not None and this.cancelling():
            raise asyncio.CancelledError
        await asyncio.sleep(_RETRY_SECONDS)


def _single(errors: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of nested groups."""
    if isinstance(errors, BaseExceptionGroup):
        for each in errors.exceptions:
            yield from _single(each)
    else:
        yield errors


def workers_of(
    controller: Controller, settings: Settings
) -> list[tuple[str, Coroutine[Any, Any, None]]]:
    """Return the name and the coroutine of each task in `WORKERS`."""
    return [
        (worker.name, worker.run(controller))
        for worker in WORKERS
        for _ in range(settings.max_concurrent if worker.is_concurrent else 1)
    ]


async def _watch_and_work(
    controller: Controller, probes: Probes, settings: Settings, on_started: Callable[[], None]
) -> None:
    """Watch and reconcile until an API is added or removed.

    Raises:
        ExceptionGroup: WatchingFailed, or an error that ends a worker.
    """
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(resync(controller, stop, settings), name=RESYNC)]
        for name, work in workers_of(controller, settings):
            running.append(tasks.create_task(work, name=name))
        await watch(
            controller,
            settings,
            on_heartbeat=probes.on_heartbeat,
            on_started=on_started,
            stop=stop,
        )
        for task in running:
            task.cancel()
    log.info("restarting the watches because an API was added or removed")


async def resync(controller: Controller, stop: asyncio.Event, settings: Settings) -> None:
    """List all objects periodically; the first list determines which kinds to watch.

    Args:
        controller: receives the objects.
        stop: set when kinds were added or removed, so that the watches must restart.
        settings: settings of the operator.
    """
    served: frozenset[str] | None = None
    reported: str | None = None
    while True:
        controller.needs_resync.clear()
        try:
            await controller.resync()
        except KubernetesError as error:
            if str(error) != reported:
                log.warning("could not list all objects; retrying", error=str(error))
            reported = str(error)
            if isinstance(error, DefinitionsMissing):
                served = controller.served
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        reported = None
        # The current watches do not cover kinds that were added since they started.
        if served not in {None, controller.served}:
            stop.set()
            return
        served = controller.served
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.resync_seconds if controller.has_kuberay else 10.0):
                await controller.needs_resync.wait()
                await asyncio.sleep(_GATHER_SECONDS)
