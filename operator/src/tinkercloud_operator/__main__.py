"""`python -m tinkercloud_operator`: settings, and the steps of startup and shutdown."""

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import structlog
from aiohttp import web
from kubernetes.aio import client
from pydantic import ValidationError
from pydantic_settings import SettingsError

from tinkercloud_crds import labels
from tinkercloud_kube.client import Client, credentials
from tinkercloud_operator import metrics
from tinkercloud_operator.run.cluster.head_calls import HeadClient
from tinkercloud_operator.run.leader import Leadership
from tinkercloud_operator.run.probes import Probes
from tinkercloud_operator.run.term import lead
from tinkercloud_operator.settings import Settings, UnknownSettingError, load_settings
from tinkercloud_protocol.wire.json_model import describe

log = structlog.get_logger(__name__)

_REQUEST_SECONDS = 30.0
"""Limit of one request to Kubernetes."""


@dataclass(slots=True)
class Process:
    """A running operator: what its steps start and stop."""

    leadership: Leadership
    probes: Probes
    term: Callable[[], Awaitable[None]]
    """Leads until cancelled."""
    stop_signal: "StopSignal"
    server: web.AppRunner | None = None
    leading: asyncio.Task[None] | None = None

    async def serve_probes(self) -> None:
        """Serve /livez, /readyz and /metrics."""
        self.server = await self.probes.serve()

    async def listen_for_signals(self) -> None:
        """Note SIGTERM and SIGINT."""
        self.stop_signal.listen()

    async def campaign(self) -> None:
        """Start to campaign for the Lease, and to lead while this replica holds it."""
        self.leading = asyncio.create_task(self.leadership.run(self.term), name="campaign")

    async def end_term(self) -> None:
        """Stop leading."""
        if self.leading is not None:
            self.leading.cancel()
            await asyncio.wait({self.leading})

    async def release_lease(self) -> None:
        """Let another replica lead at once."""
        await self.leadership.resign()

    async def stop_probes(self) -> None:
        """Stop serving /livez, /readyz and /metrics."""
        if self.server is not None:
            await self.server.cleanup()


STARTUP = (Process.serve_probes, Process.listen_for_signals, Process.campaign)
"""Steps of the startup, in order."""
SHUTDOWN = (Process.end_term, Process.release_lease, Process.stop_probes)
"""Steps of the shutdown, in order."""


async def run(settings: Settings) -> None:
    """Run the operator until a stop signal."""
    configuration = await credentials()
    # Any number of save requests may be in flight at the same time.
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        client.ApiClient(configuration) as api,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        await _run_process(_process(api, http, settings))


def _process(api: client.ApiClient, http: aiohttp.ClientSession, settings: Settings) -> Process:
    leadership = Leadership(api, settings)
    cluster = Client(
        api,
        settings.namespace,
        manager=labels.OPERATOR_FIELD_MANAGER,
        timeout_seconds=_REQUEST_SECONDS,
        may_send=leadership.may_act,
        count=_count_request,
    )
    probes, stop_signal = Probes(leadership, settings), StopSignal()

    async def term() -> None:
        # kopf installs its own signal handlers when it starts, which would only end the watches.
        await lead(cluster, HeadClient(cluster, http), probes, settings, stop_signal.listen)

    return Process(leadership, probes, term, stop_signal)


async def _run_process(process: Process) -> None:
    """Run the operator until a stop signal, or until leading fails.

    Raises:
        Exception: leading failed.
    """
    for step in STARTUP:
        await step(process)
    assert process.leading is not None  # noqa: S101 - a step of the startup
    stopped = asyncio.create_task(process.stop_signal.wait())
    await asyncio.wait({process.leading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    for step in SHUTDOWN:
        await step(process)
    if not process.leading.cancelled():
        await process.leading


def _count_request(verb: str, code: str) -> None:
    metrics.API_REQUESTS.labels(verb, code).inc()


class StopSignal(asyncio.Event):
    """Set by SIGTERM and SIGINT."""

    def listen(self) -> None:
        """Install signal handlers, replacing existing ones."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.set)


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
