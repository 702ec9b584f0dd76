"""`python -m tinkercloud_operator`: settings, leader election, and the work of a leader."""

import asyncio
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import aiohttp
import structlog
from kubernetes.aio import client
from pydantic import ValidationError
from pydantic_settings import SettingsError

from tinkercloud_crds import labels
from tinkercloud_kube.client import Client, credentials
from tinkercloud_kube.errors import KubernetesError
from tinkercloud_operator import metrics
from tinkercloud_operator.run.cluster.head_calls import HeadClient
from tinkercloud_operator.run.controller import Controller, DefinitionsMissing
from tinkercloud_operator.run.handlers import WatchingFailed, watch
from tinkercloud_operator.run.leader import Leadership
from tinkercloud_operator.run.probes import Probes
from tinkercloud_operator.settings import Settings, UnknownSettingError, load_settings
from tinkercloud_protocol.wire.json_model import describe

log = structlog.get_logger(__name__)

_REQUEST_SECONDS = 30.0
"""Limit of one request to Kubernetes."""
_RETRY_SECONDS = 1.0
_GATHER_SECONDS = 2.0
"""Pause before a resync: watches often restart together, and one list serves them all."""


async def run(settings: Settings) -> None:
    """Run the operator until a stop signal."""
    configuration = await credentials()
    # Any number of save requests may be in flight at the same time.
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        client.ApiClient(configuration) as api,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        leadership = Leadership(api, settings)
        cluster = Client(
            api,
            settings.namespace,
            manager=labels.OPERATOR_FIELD_MANAGER,
            timeout_seconds=_REQUEST_SECONDS,
            may_send=leadership.may_act,
            count=_count_request,
        )
        probes = Probes(leadership, settings)
        server = await probes.serve()

        stop_signal = StopSignal()
        stop_signal.listen()

        async def term() -> None:
            await _lead(cluster, HeadClient(cluster, http), probes, settings, stop_signal)

        leading = asyncio.create_task(leadership.run(term))
        stopped = asyncio.create_task(stop_signal.wait())
        await asyncio.wait({leading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        leading.cancel()
        stopped.cancel()
        await asyncio.wait({leading})
        await leadership.resign()
        await server.cleanup()
        if not leading.cancelled():
            await leading


def _count_request(verb: str, code: str) -> None:
    metrics.API_REQUESTS.labels(verb, code).inc()


class StopSignal(asyncio.Event):
    """Set by SIGTERM and SIGINT."""

    def listen(self) -> None:
        """Install signal handlers, replacing existing ones."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.set)


async def _lead(
    cluster: Client,
    head_client: HeadClient,
    probes: Probes,
    settings: Settings,
    stop_signal: StopSignal,
) -> None:
    """Lead until cancelled; restart the watches when an API is added or removed."""
    while True:
        controller = Controller(cluster, head_client, settings)
        probes.unready = controller.unready
        probes.on_heartbeat()
        try:
            await _watch_and_work(controller, probes, settings, stop_signal)
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


async def _watch_and_work(
    controller: Controller, probes: Probes, settings: Settings, stop_signal: StopSignal
) -> None:
    """Watch and reconcile until an API is added or removed.

    Raises:
        ExceptionGroup: WatchingFailed, or an error that ends a worker.
    """
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        resync = tasks.create_task(_resync(controller, stop, settings))
        workers = [tasks.create_task(controller.work()) for _ in range(settings.max_concurrent)]
        workers.append(tasks.create_task(controller.work_on_base_models()))
        workers.append(tasks.create_task(controller.work_on_tenants()))
        workers.append(tasks.create_task(controller.work_on_pools()))
        workers.append(tasks.create_task(controller.scale_engines()))
        workers.append(tasks.create_task(controller.save_heads()))
        workers.append(tasks.create_task(controller.watch_definitions()))
        workers.append(tasks.create_task(controller.watch_nodes()))
        workers.append(tasks.create_task(controller.count()))
        # kopf installs its own signal handlers when it starts, which would only end the watches.
        await watch(
            controller,
            settings,
            on_heartbeat=probes.on_heartbeat,
            on_started=stop_signal.listen,
            stop=stop,
        )
        for task in (resync, *workers):
            task.cancel()
    log.info("restarting the watches because an API was added or removed")


async def _resync(controller: Controller, stop: asyncio.Event, settings: Settings) -> None:
    """List all objects periodically; the first list determines which kinds to watch."""
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


def main() -> None:
    """Run the operator with the environment's settings; exit with a message if invalid."""
    try:
        settings = load_settings()
    except ValidationError as error:
        sys.exit(f"settings: {describe(error)}")
    except (UnknownSettingError, SettingsError) as error:
        sys.exit(f"settings: {error}")
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
