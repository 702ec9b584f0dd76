"""The API server as data: its routes, its middleware, and what it is made of.

/api/v1/<hot paths>      routes.hot, forwarded to session heads as bytes
/api/v1/...              routes.sessions, models, runs, keys: answered here
/hf/...                  routes.hub: the tokenizer mirror
/healthz /livez          routes.health
/openapi.json            openapi: what is served, as data
/metrics                 measuring, on a port of its own
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial

import structlog
from fastapi import FastAPI

from tinkercloud_api import errors, metrics
from tinkercloud_api.activity import Activity
from tinkercloud_api.auth import REMEMBERED_SECONDS, Authenticator, Role, hash_key
from tinkercloud_api.catalog.database import migrate, open_database
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.tables import now
from tinkercloud_api.checkpoints import Checkpoints, open_store
from tinkercloud_api.context import Context
from tinkercloud_api.head_client import open_session
from tinkercloud_api.head_locator import HeadLocator
from tinkercloud_api.http import Receive, Scope, Send
from tinkercloud_api.limits import BodyLimitMiddleware
from tinkercloud_api.long_polls import LongPolls
from tinkercloud_api.measuring import MetricsMiddleware, metrics_server
from tinkercloud_api.openapi import describe
from tinkercloud_api.providers.base import SessionProvider
from tinkercloud_api.proxy import Proxy
from tinkercloud_api.routes import (
    health,
    hot,
    hub,
    keys,
    models,
    runs,
    sessions,
    unloading,
    usage,
)
from tinkercloud_api.settings import Settings
from tinkercloud_api.shared_heads import SharedHeads
from tinkercloud_api.training_runs import TrainingRuns
from tinkercloud_protocol.futures import QueueState

log = structlog.get_logger(__name__)

JSON_BODY_BYTES = 1 << 20
_JANITOR_SECONDS = 30.0
_REPORT_SECONDS = 10.0
"""Of a stopping server, for finding out which runs its heads have not saved."""
_UP_FOR_EXPIRY = timedelta(days=1)
"""A server that was away gives clients this time to come back, before it ends their sessions."""


class Application:
    """The ASGI application; it opens its catalog and starts its provider when it is served."""

    def __init__(self, settings: Settings, provider: SessionProvider) -> None:
        self._settings = settings
        self._provider = provider
        self.context: Context | None = None
        """The server's parts, while it runs."""
        # The pages that show the description would load scripts from elsewhere.
        api = FastAPI(title="Tinkercloud", lifespan=self._lifespan, docs_url=None, redoc_url=None)
        api.openapi = partial(describe, api)  # type: ignore[method-assign]  # as FastAPI says to
        for module in (sessions, usage, models, unloading, runs, keys, health, hub):
            api.include_router(module.router)
        api.add_middleware(BodyLimitMiddleware, max_bytes=JSON_BODY_BYTES)
        errors.install(api)
        self._asgi = MetricsMiddleware(
            hot.HotPaths(api, self._running, api.routes), hot.HANDLERS.keys()
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event (the ASGI entry point)."""
        await self._asgi(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, api: FastAPI) -> AsyncIterator[None]:
        settings = self._settings
        async with (
            metrics_server(settings.host, settings.metrics_port),
            running_context(settings, self._provider) as self.context,
        ):
            api.state.context = self.context
            _measure(self.context)
            yield

    def _running(self) -> Context:
        assert self.context is not None  # noqa: S101 - requests come after start-up
        return self.context


@asynccontextmanager
async def running_context(settings: Settings, provider: SessionProvider) -> AsyncIterator[Context]:
    """Open everything a server needs, and close it again."""
    engine = open_database(settings.catalog_url)
    await migrate(engine)
    catalog = Catalog(engine)
    await register_bootstrap_key(catalog, settings)
    session = open_session()
    checkpoints = Checkpoints(catalog, open_store(settings.checkpoint_url))
    locator = HeadLocator(catalog, checkpoints, provider, session)
    activity = Activity(catalog)
    context = Context(
        settings=settings,
        catalog=catalog,
        authenticator=Authenticator(catalog, activity.use_key),
        provider=provider,
        checkpoints=checkpoints,
        locator=locator,
        training_runs=TrainingRuns(catalog, provider, checkpoints, locator),
        proxy=Proxy(session),
        activity=activity,
        shared_heads=SharedHeads(
            catalog,
            provider,
            activity,
            session,
            silence=timedelta(seconds=settings.session_silence_seconds),
            period=_inactivity_period(settings),
        ),
        long_polls=LongPolls(),
    )
    await provider.start()
    duties = [_run_housekeeping(context), _suspend_inactive(context)]
    tasks = [asyncio.create_task(duty) for duty in duties]
    try:
        yield context
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await provider.stop()
        await _report_lost(locator)
        await context.activity.write()
        await session.close()
        await catalog.close()


async def _report_lost(locator: HeadLocator) -> None:
    """Log what the stopped heads have not saved, unless the store keeps that from being known."""
    try:
        async with asyncio.timeout(_REPORT_SECONDS):
            await locator.report_lost()
    except TimeoutError:
        log.warning("the checkpoint store does not say in time which runs are saved")


async def register_bootstrap_key(catalog: Catalog, settings: Settings) -> None:
    """Register the key of the settings, if there is one; the one it replaces is revoked."""
    if settings.bootstrap_key is None:
        return
    row, replaced = await catalog.add_bootstrap_key(
        key_hash=hash_key(settings.bootstrap_key.get_secret_value()),
        name="bootstrap",
        owner="bootstrap",
        role=Role.ADMIN,
    )
    if not row.is_valid(now()):
        log.warning(
            "the configured bootstrap key was revoked or has expired, and stays refused: configure"
            " another one",
            key_id=row.id,
        )
    for key_id in replaced:
        log.warning(
            "the configured bootstrap key replaces an earlier one, which is revoked",
            revoked_key_id=key_id,
            other_replicas_refuse_it_within_seconds=REMEMBERED_SECONDS,
        )


def _measure(context: Context) -> None:
    """Have what can be counted at any time counted when Prometheus asks."""
    metrics.LONG_POLLS.set_function(context.long_polls.__len__)
    for state in metrics.QUEUE_STATES:
        waiting = metrics.WAITING_RUNS.labels(state)
        waiting.set_function(partial(_count_waiting, context.locator, state))


def _count_waiting(locator: HeadLocator, state: QueueState) -> int:
    return locator.waiting()[state]


async def _run_housekeeping(context: Context) -> None:
    """Write down activity and take away what is over, every now and then."""

    async def count_sessions() -> None:
        since = now() - usage.LIVE
        metrics.CLIENT_SESSIONS.set(await context.catalog.count_live_sessions(since))

    started = now()

    async def expire_sessions() -> None:
        days, moment = context.settings.session_expiry_days, now()
        is_local = context.settings.provider == "local"
        if is_local and days is not None and moment - started >= _UP_FOR_EXPIRY:
            await context.training_runs.expire_sessions(moment, days)

    while True:
        for duty in (
            context.activity.write,
            count_sessions,
            expire_sessions,
            context.checkpoints.delete_expired,
            context.locator.report_lost,
            lambda: context.locator.release_leftovers(now()),
        ):
            try:
                await duty()
            except Exception:
                metrics.HOUSEKEEPING_ERRORS.inc()
                log.exception("housekeeping failed; it is tried again")
        await asyncio.sleep(_JANITOR_SECONDS)


def _inactivity_period(settings: Settings) -> timedelta:
    """Return how often is looked for silent clients."""
    return timedelta(seconds=min(_JANITOR_SECONDS, settings.session_silence_seconds))


async def _suspend_inactive(context: Context) -> None:
    """Suspend the models of silent clients, a task of its own: writing a model takes long."""
    period = _inactivity_period(context.settings).total_seconds()
    while True:
        try:
            await context.shared_heads.suspend_inactive(now())
        except Exception:
            metrics.HOUSEKEEPING_ERRORS.inc()
            log.exception("models without clients were not suspended; it is tried again")
        await asyncio.sleep(period)
