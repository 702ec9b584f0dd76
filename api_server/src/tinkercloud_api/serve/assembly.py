"""What a running server consists of: middleware, startup, periodic tasks and shutdown.

`api_app` runs the server from these lists, and a test compares them with a running server.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import aiohttp
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from tinkercloud_api.access import server_acts
from tinkercloud_api.catalog.access.audit_log import AuditLog
from tinkercloud_api.catalog.schema import connection
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config import api_metrics
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.context import Context
from tinkercloud_api.heads.head_reports import HeadReports
from tinkercloud_api.heads.run_admission import RunAdmission
from tinkercloud_api.login.login_pages import LoginPages
from tinkercloud_api.routes.account import session_usage
from tinkercloud_api.serve.hot_paths import HotPaths
from tinkercloud_api.serve.hot_routes import EXACT_PATHS, JSON
from tinkercloud_api.web.middleware import (
    BodyLimitMiddleware,
    MetricsMiddleware,
    MetricsServer,
    RequestIdMiddleware,
    ShortPathMiddleware,
)
from tinkercloud_protocol.heads.reports.usage_reports import hour_of
from tinkercloud_protocol.wire.errors import WireError

if TYPE_CHECKING:
    from tinkercloud_api.web.request_spans import RequestSpans

log = structlog.get_logger(__name__)

_INACTIVITY_SECONDS = 30.0
"""Longest time between two checks for inactive clients."""
_REPORT_SECONDS = 10.0
"""Time limit at shutdown for determining which runs the heads did not save."""
_UP_FOR_EXPIRY = timedelta(days=1)
"""Time that clients have to reconnect after a server start before their sessions can expire."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opened:
    """The catalog of a server that has no other components yet."""

    settings: Settings
    engine: AsyncEngine
    catalog: Catalog
    audit_log: AuditLog


@dataclass(frozen=True, slots=True)
class Server:
    """The components of a server that is starting, running or stopping."""

    context: Context
    admission: RunAdmission
    client: aiohttp.ClientSession
    """For requests to heads."""
    login: LoginPages
    metrics: MetricsServer
    started_at: datetime


@dataclass(frozen=True, slots=True)
class Step(Generic[T]):
    """Something that a server does once, periodically, or for as long as it runs."""

    name: str
    """In logs, and of an asyncio task in `TASKS`."""
    run: Callable[[T], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Outside:
    """What middleware needs of the application inside it."""

    settings: Settings
    server: Callable[[], Context]
    """Returns the components of the server, which exist once it is running."""
    routed: Sequence[BaseRoute]
    """Routes of the application."""
    spans: "RequestSpans | None"
    """Makes spans of requests; None: nothing receives them."""


MIDDLEWARE: tuple[Callable[[ASGIApp, Outside], ASGIApp], ...] = (
    lambda app, _: ShortPathMiddleware(app),
    lambda app, _: RequestIdMiddleware(app),
    lambda app, outside: MetricsMiddleware(app, EXACT_PATHS, outside.spans),
    lambda app, outside: HotPaths(app, outside.server, outside.routed),
    lambda app, outside: BodyLimitMiddleware(app, JSON.max_bytes(outside.settings)),
)
"""The middleware around the application, the outermost first."""


def spans_of(settings: Settings) -> "RequestSpans | None":
    """Return what makes spans of requests; None if the settings name no collector for them."""
    if settings.otlp_endpoint is None:
        return None
    # OpenTelemetry is an extra.
    from tinkercloud_api.web.request_spans import RequestSpans  # noqa: PLC0415

    return RequestSpans(settings.otlp_endpoint)


def inactivity_period(settings: Settings) -> timedelta:
    """Return the interval between checks for inactive clients."""
    return timedelta(seconds=min(_INACTIVITY_SECONDS, settings.session_silence_seconds))


async def _count_sessions(server: Server) -> None:
    since = now() - session_usage.LIVE
    api_metrics.CLIENT_SESSIONS.set(await server.context.catalog.count_live_sessions(since))


async def _expire_sessions(server: Server) -> None:
    settings, moment = server.context.settings, now()
    days, is_local = settings.session_expiry_days, settings.provider == "local"
    if is_local and days is not None and moment - server.started_at >= _UP_FOR_EXPIRY:
        await server.context.training_runs.expire_sessions(moment, days)


async def _forget_curves(server: Server) -> None:
    context = server.context
    await context.points.forget(now() - timedelta(days=context.settings.curve_days))


HOUSEKEEPING: tuple[Step[Server], ...] = (
    Step(
        "count requests that run as use",
        lambda s: s.context.locator.note_running([*s.context.proxy.running]),
    ),
    Step("record when sessions and keys were used", lambda s: s.context.activity.write()),
    Step("count sessions", _count_sessions),
    Step("expire sessions", _expire_sessions),
    Step("delete expired checkpoints", lambda s: s.context.checkpoints.delete_expired()),
    Step("remove stored runs", lambda s: s.context.stored_runs.sweep()),
    Step("report lost runs", lambda s: s.context.locator.report_lost()),
    Step("release ended sessions", lambda s: s.context.locator.deleted.release_leftovers(now())),
    Step("delete old audit entries", lambda s: s.context.auditing.forget(now())),
    Step("delete old curves", _forget_curves),
    Step("index earlier runs for the search", lambda s: s.context.catalog.make_searchable()),
    Step("forget ended browser sessions", lambda s: s.context.browsers.tokens.forget(now())),
    Step("measure storage", lambda s: s.context.billing.measure(hour_of(now()) // 24)),
)
"""Periodic steps, every `Settings.housekeeping_seconds`, one after another."""
CARE_FOR_HEADS: tuple[Step[Server], ...] = (
    Step("suspend inactive models", lambda s: s.context.shared_heads.suspend_inactive(now())),
    Step("drop unclaimed models", lambda s: s.context.shared_heads.drop_orphans(now())),
)
"""Periodic steps about the models of shared heads, every `inactivity_period`, one after another.

Apart from the housekeeping, because heads write whole models meanwhile.
"""


async def _run_housekeeping(server: Server) -> None:
    await _repeat(HOUSEKEEPING, server, server.context.settings.housekeeping_seconds)


async def _care_for_heads(server: Server) -> None:
    period = inactivity_period(server.context.settings)
    await _repeat(CARE_FOR_HEADS, server, period.total_seconds())


async def _repeat(steps: Sequence[Step[Server]], server: Server, pause_seconds: float) -> None:
    """Run steps periodically. The next one runs even if one fails."""
    while True:
        for step in steps:
            try:
                await step.run(server)
            except Exception:
                api_metrics.HOUSEKEEPING_ERRORS.inc()
                log.exception("a periodic step failed; will retry", step=step.name)
        await asyncio.sleep(pause_seconds)


TASKS: tuple[Step[Server], ...] = (
    Step("housekeeping", _run_housekeeping),
    Step("care for heads", _care_for_heads),
    Step("follow ended runs", lambda s: s.admission.follow()),
    Step("notify heads whose samples are kept", lambda s: s.context.sampled_runs.follow()),
)
"""What runs as long as the server, alongside the requests. Components have tasks of their own."""


OPENING: tuple[Step[Opened], ...] = (
    Step("migrate the catalog", lambda o: connection.migrate(o.engine)),
    Step("record settings", lambda o: server_acts.record_settings(o.audit_log, o.settings)),
    Step(
        "register the bootstrap key",
        lambda o: server_acts.register_bootstrap_key(o.catalog, o.audit_log, o.settings),
    ),
)
"""Steps before the components are made, which read the catalog; in order."""


async def _serve_metrics(server: Server) -> None:
    settings = server.context.settings
    await server.metrics.start(settings.host, settings.metrics_port)


async def _start_heads(server: Server) -> None:
    context = server.context
    reports = HeadReports(context.usage, context.points, context.samples)
    await context.provider.start(reports.record)


async def _start_deliveries(server: Server) -> None:
    server.context.deliveries.start()


async def _open_logins(server: Server) -> None:
    settings = server.context.settings
    if settings.oidc is not None and settings.public_url is not None:
        await server.login.open(server.context, settings.oidc, settings.public_url)


async def _measure(server: Server) -> None:
    context = server.context
    api_metrics.measure(context.long_polls.__len__, context.locator.pending_counts)


async def _report_lost(server: Server) -> None:
    """Log the runs that stopped heads did not save, unless the checkpoint store is too slow."""
    try:
        async with asyncio.timeout(_REPORT_SECONDS):
            await server.context.locator.report_lost()
    except TimeoutError:
        log.warning(
            "the checkpoint store did not respond in time; cannot determine which runs were saved"
        )


STARTUP: tuple[Step[Server], ...] = (
    Step("serve the metrics", _serve_metrics),
    Step("open the logins", _open_logins),
    Step("start the session heads", _start_heads),
)
"""The first steps, in order. If one fails, there is nothing yet for `SHUTDOWN` to stop."""
WITH_HEADS: tuple[Step[Server], ...] = (
    Step("serve the added models", lambda s: s.context.base_models.start()),
    Step("start deliveries", _start_deliveries),
    Step("start the programs", lambda s: s.context.programs.start()),
    Step("compute gauges", _measure),
)
"""Steps between `STARTUP` and the first request, in order; `TASKS` start after them. If one fails,
`SHUTDOWN` follows."""
SHUTDOWN: tuple[Step[Server], ...] = (
    Step("end the downloads of models", lambda s: s.context.base_models.stop()),
    Step("stop deliveries", lambda s: s.context.deliveries.stop()),
    Step("stop the programs", lambda s: s.context.programs.stop()),
    Step("stop the session heads", lambda s: s.context.provider.stop()),
    Step("find out which runs were saved", _report_lost),
    Step("record when sessions and keys were used", lambda s: s.context.activity.write()),
)
"""Steps after the last request and after the end of `TASKS`, in order.

They accept components that were never started.
"""
CLOSING: tuple[Step[Server], ...] = (
    Step("close the connections to heads", lambda s: s.client.close()),
    Step("close the catalog", lambda s: s.context.catalog.close()),
    Step("stop serving the metrics", lambda s: s.metrics.stop()),
)
"""Steps after `SHUTDOWN`, in order; they also run if the startup failed."""


async def opened(settings: Settings) -> Opened:
    """Open the catalog of a server.

    Raises:
        Unavailable: the database does not respond.
    """
    engine = connection.open_database(settings.catalog_url)
    server = Opened(settings, engine, Catalog(engine), AuditLog(engine))
    try:
        for step in OPENING:
            await step.run(server)
    except BaseException:
        await server.catalog.close()
        raise
    return server


def server_of(
    context: Context, admission: RunAdmission, client: aiohttp.ClientSession, login: LoginPages
) -> Server:
    """Return a server that has these components and starts now."""
    metrics = MetricsServer(lambda: [head.url for head in context.provider.shared_heads()])
    return Server(context, admission, client, login, metrics, started_at=now())


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[None]:
    """Run a server for the duration of the context: its startup, its tasks, and its shutdown.

    The next step of the shutdown runs even if one fails, as on a full disk.
    """
    try:
        for step in STARTUP:
            await step.run(server)
        tasks: list[asyncio.Task[None]] = []
        try:
            for step in WITH_HEADS:
                await step.run(server)
            tasks += [asyncio.create_task(task.run(server), name=task.name) for task in TASKS]
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await _stop(SHUTDOWN, server)
    finally:
        await _stop(CLOSING, server)


async def _stop(steps: Sequence[Step[Server]], server: Server) -> None:
    for step in steps:
        try:
            await step.run(server)
        except (WireError, OSError) as error:
            log.warning("a step of the shutdown failed", step=step.name, reason=str(error))
