"""The API server: its routes and its components; `assembly` has what else it consists of.

/api/v1/<hot paths>      hot_paths, routes.requests: forwarded to session heads
/api/v1/...              routes.account, checkpoints, models, sessions: served by this process
/hf/...                  routes.models.hub_mirror: the tokenizer mirror
/traces/...              routes.sessions.traces: traces of sessions, by signed URLs
/downloads/...           routes.checkpoints.download_routes: files of checkpoints, by signed URLs
/console                 console: pages for browsers
/healthz /readyz /livez  routes.health
/openapi.json            serve.openapi: the API description
/metrics                 web.middleware.MetricsServer, on a port of its own
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial

import aiohttp
import structlog
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.routing import Route
from starlette.types import ASGIApp

from tinkercloud_api.access.access_tokens import AccessTokens
from tinkercloud_api.access.auditing import Auditing
from tinkercloud_api.access.auth import Authenticator
from tinkercloud_api.access.browser_sessions import BrowserSessions
from tinkercloud_api.access.owner_tenants import Tenants
from tinkercloud_api.access.project_rights import Projects
from tinkercloud_api.catalog.access.audit_log import AuditLog
from tinkercloud_api.catalog.access.console_tokens import ConsoleTokens
from tinkercloud_api.catalog.runs.admission import RunQuotas
from tinkercloud_api.catalog.runs.logged_values import LoggedValues
from tinkercloud_api.catalog.runs.program_rows import ProgramCatalog
from tinkercloud_api.catalog.runs.run_points import RunPoints
from tinkercloud_api.catalog.runs.sample_texts import SampleTexts
from tinkercloud_api.catalog.runs.sampler_clients import SamplerClients
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.usage.billing_rows import Billing
from tinkercloud_api.catalog.usage.usage_ledger import UsageLedger
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_api.checkpoints.storage_quota import StorageQuota
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.console import (
    account_pages,
    checkpoint_pages,
    console_pages,
    model_pages,
    playground_pages,
    program_pages,
    session_pages,
    usage_pages,
    user_pages,
)
from tinkercloud_api.context import Context
from tinkercloud_api.heads.activity import Activity
from tinkercloud_api.heads.deliveries import Deliveries
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.heads.proxy import Proxy
from tinkercloud_api.heads.run_admission import RunAdmission
from tinkercloud_api.heads.run_states import RunStates
from tinkercloud_api.heads.sampled_runs import SampledRuns
from tinkercloud_api.heads.shared_heads import SharedHeads
from tinkercloud_api.login import login_pages
from tinkercloud_api.providers.base import SessionProvider
from tinkercloud_api.providers.cluster.kubernetes_programs import KubernetesPrograms
from tinkercloud_api.providers.cluster.kubernetes_provider import KubernetesProvider
from tinkercloud_api.providers.head_http_client import open_client
from tinkercloud_api.providers.local.local_programs import LocalPrograms
from tinkercloud_api.providers.program_runner import ProgramRunner
from tinkercloud_api.routes import health
from tinkercloud_api.routes.account import (
    audit_routes,
    billing_routes,
    key_routes,
    project_routes,
    session_usage,
    usage_routes,
    user_routes,
)
from tinkercloud_api.routes.checkpoints import (
    checkpoint_search,
    download_routes,
    importing,
    run_routes,
    surplus_routes,
)
from tinkercloud_api.routes.models import (
    base_model_routes,
    hub_mirror,
    model_routes,
    tokenizers,
)
from tinkercloud_api.routes.requests import loss_routes, result_routes, unloading
from tinkercloud_api.routes.sessions import (
    problem_routes,
    program_routes,
    run_state_routes,
    sample_text_routes,
    session_routes,
    session_search_routes,
    traces,
)
from tinkercloud_api.runs.base_models import BaseModels
from tinkercloud_api.runs.direct_sessions import DirectSessions
from tinkercloud_api.runs.owner_programs import Programs
from tinkercloud_api.runs.quota_listing import Quotas
from tinkercloud_api.runs.run_control import Runs
from tinkercloud_api.runs.sampling_sessions import SamplingSessions
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_api.runs.uploaded_losses import CustomLosses
from tinkercloud_api.serve import assembly
from tinkercloud_api.serve.model_download import files_of
from tinkercloud_api.serve.openapi import describe
from tinkercloud_api.serve.route_table import Row, table
from tinkercloud_api.transfers.copies import Copies
from tinkercloud_api.transfers.downloads import Downloads
from tinkercloud_api.transfers.imports import Imports
from tinkercloud_api.transfers.stored_runs import StoredRuns
from tinkercloud_api.web import error_handlers
from tinkercloud_api.web.health_checks import HealthChecks
from tinkercloud_api.web.long_polls import LongPolls
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire.asgi import Receive, Scope, Send

log = structlog.get_logger(__name__)

_ROUTED = (
    *(session_routes, health, session_search_routes),
    *(session_usage, usage_routes, model_routes, unloading, tokenizers),
    base_model_routes,
    *(result_routes, download_routes, importing, loss_routes, audit_routes, billing_routes),
    *(traces, project_routes, user_routes),
    *(checkpoint_search, surplus_routes),
    *(console_pages, checkpoint_pages, account_pages, program_pages, usage_pages),
    *(model_pages, playground_pages, session_pages, user_pages),
    problem_routes,
    *(run_routes, run_state_routes, sample_text_routes, program_routes, key_routes, hub_mirror),
)
"""Modules with the routes that FastAPI serves. No request fits two of them; they are compared with
each request in this order, so that the most frequent ones come first."""
_SIGNING_KEY = "download URLs"
"""Name of the secret in the catalog."""
_TOKEN_SECRET = "access tokens"  # noqa: S105 - a name
"""Name of the secret in the catalog."""


class Application:
    """The ASGI application. It opens its catalog and starts its provider at startup."""

    def __init__(self, settings: Settings, provider: SessionProvider) -> None:
        self._settings = settings
        self._provider = provider
        self.context: Context | None = None
        """The components of the server while it is running."""
        self.own_url = f"http://{settings.host}:{settings.port}"
        """URL of the server for programs on this machine."""
        self._login = login_pages.LoginPages()
        # The documentation pages would load scripts from third-party servers. A redirect from paths
        # with a trailing slash would have no message.
        api = FastAPI(
            title="Tinkercloud",
            lifespan=self._lifespan,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            # Its spans would have the queries of signed URLs.
            telemetry={"tracing": False, "logs": False, "auto_configure": False},
        )
        for module in _ROUTED:
            api.include_router(module.router)
        if settings.oidc is not None:
            api.router.routes += [Route(path, self._login) for path in login_pages.PATHS]
        error_handlers.install(api)
        self.route_table: list[Row] = table(api.routes)
        """All routes of the server."""
        # As FastAPI documents it.
        api.openapi = partial(describe, api, self.route_table)  # type: ignore[method-assign]
        self._spans = assembly.spans_of(settings)
        outside = assembly.Outside(settings, self._running, api.routes, self._spans)
        self._asgi: ASGIApp = api
        for layer in reversed(assembly.MIDDLEWARE):
            self._asgi = layer(self._asgi, outside)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event (the ASGI entry point)."""
        await self._asgi(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, api: FastAPI) -> AsyncIterator[None]:
        opened = running_context(self._settings, self._provider, self.own_url, self._login)
        async with opened as self.context:
            api.state.context = self.context
            yield
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    def _running(self) -> Context:
        assert self.context is not None  # noqa: S101 - requests arrive after startup
        return self.context


@asynccontextmanager
async def running_context(
    settings: Settings,
    provider: SessionProvider,
    own_url: str = "http://127.0.0.1:8000",
    login: login_pages.LoginPages | None = None,
) -> AsyncIterator[Context]:
    """Open the components of a server, whose URL for programs is `own_url`, and its login pages."""
    opened, client = await assembly.opened(settings), open_client()
    try:
        context, admission = await _components(opened, client, provider, own_url)
    except BaseException:
        await client.close()
        await opened.catalog.close()
        raise
    served = assembly.server_of(context, admission, client, login or login_pages.LoginPages())
    async with assembly.running(served):
        yield context


async def _components(
    opened: assembly.Opened, client: aiohttp.ClientSession, provider: SessionProvider, own_url: str
) -> tuple[Context, RunAdmission]:
    settings = opened.settings
    engine, catalog, audit_log = opened.engine, opened.catalog, opened.audit_log
    tenants, projects = Tenants(provider.tenants), Projects(catalog)
    store, activity, proxy = open_store(settings.checkpoint_url), Activity(catalog), Proxy(client)
    checkpoints = Checkpoints(catalog, store, StorageQuota(catalog, tenants))
    admission, objects = _admission(settings, engine, tenants, activity), ObjectStoreClient(store)
    locator = HeadLocator(catalog, checkpoints, provider, client, admission)
    stored_runs = _stored_runs(settings, catalog, checkpoints, objects)
    authenticator = await _authenticator(catalog, audit_log, activity)
    programs = _programs(
        settings, provider, engine=engine, catalog=catalog, authenticator=authenticator, url=own_url
    )
    shared_heads = _shared_heads(settings, catalog, provider, activity, client)
    samples = SampleTexts(engine)
    training_runs = TrainingRuns(catalog, provider, checkpoints, locator, programs.halt_models)
    context = Context(
        settings=settings,
        catalog=catalog,
        authenticator=authenticator,
        provider=provider,
        base_models=BaseModels(settings, provider, catalog, files_of(settings)),
        checkpoints=checkpoints,
        health=HealthChecks(catalog, checkpoints),
        downloads=await _downloads(settings, catalog, checkpoints, objects),
        locator=locator,
        training_runs=training_runs,
        runs=Runs(RunStates(catalog, locator, checkpoints, provider, shared_heads), training_runs),
        proxy=proxy,
        deliveries=Deliveries(checkpoints.deferred, locator, provider, proxy, tenants),
        activity=activity,
        shared_heads=shared_heads,
        long_polls=LongPolls(),
        programs=programs,
        stored_runs=stored_runs,
        copies=Copies(checkpoints, training_runs, stored_runs, projects),
        imports=Imports(catalog, training_runs, stored_runs, projects, settings.max_import_bytes),
        direct_sessions=DirectSessions(catalog, training_runs),
        sampling_sessions=_samplers(catalog, checkpoints, locator, training_runs, activity),
        browsers=BrowserSessions(ConsoleTokens(engine), authenticator),
        usage=UsageLedger(engine),
        points=RunPoints(engine),
        logged=LoggedValues(engine),
        samples=samples,
        sampled_runs=SampledRuns(samples, provider, locator.calls),
        sampler_clients=SamplerClients(engine),
        custom_losses=CustomLosses(objects, training_runs),
        billing=Billing(engine),
        auditing=Auditing(audit_log, settings.audit_days),
        tenants=tenants,
        projects=projects,
        quotas=_quotas(provider, admission, StorageQuota(catalog, tenants)),
    )
    return context, admission


async def _authenticator(
    catalog: Catalog, audit_log: AuditLog, activity: Activity
) -> Authenticator:
    restored = await audit_log.restored_backup()
    return Authenticator(catalog, activity.use_key, await _tokens(catalog), restored)


def _samplers(
    catalog: Catalog,
    checkpoints: Checkpoints,
    locator: HeadLocator,
    training_runs: TrainingRuns,
    activity: Activity,
) -> SamplingSessions:
    return SamplingSessions(catalog, checkpoints, locator.known, training_runs, activity)


def _quotas(provider: SessionProvider, admission: RunAdmission, storage: StorageQuota) -> Quotas:
    if isinstance(provider, KubernetesProvider):
        return Quotas(storage.tenants, provider.tenant_usage, storage)
    return Quotas(storage.tenants, admission.usage, storage)


def _admission(
    settings: Settings, engine: AsyncEngine, tenants: Tenants, activity: Activity
) -> RunAdmission:
    """Return what admits runs; on Kubernetes no run waits here, as the operator admits them."""
    inactivity = timedelta(seconds=settings.session_silence_seconds)
    limited = tenants if settings.provider == "local" else Tenants()
    return RunAdmission(RunQuotas(engine), limited, inactivity, activity.write)


def _shared_heads(
    settings: Settings,
    catalog: Catalog,
    provider: SessionProvider,
    activity: Activity,
    client: aiohttp.ClientSession,
) -> SharedHeads:
    return SharedHeads(
        catalog,
        provider,
        activity,
        client,
        inactivity=timedelta(seconds=settings.session_silence_seconds),
        period=assembly.inactivity_period(settings),
    )


def _stored_runs(
    settings: Settings, catalog: Catalog, checkpoints: Checkpoints, objects: ObjectStoreClient
) -> StoredRuns:
    return StoredRuns(catalog, checkpoints, objects, settings.max_checkpoint_bytes_per_owner)


async def _tokens(catalog: Catalog) -> AccessTokens:
    """Return what issues and verifies access tokens, with the same secret in all replicas."""
    return AccessTokens(await catalog.shared_secret(_TOKEN_SECRET))


async def _downloads(
    settings: Settings, catalog: Catalog, checkpoints: Checkpoints, objects: ObjectStoreClient
) -> Downloads:
    key = await _signing_key(catalog, settings)
    return Downloads(checkpoints, objects, settings.downloads, key)


async def _signing_key(catalog: Catalog, settings: Settings) -> bytes:
    """Return the key that signs URLs, which is the same in all replicas and after restarts."""
    configured = settings.downloads.signing_key
    if configured is not None:
        return configured.get_secret_value().encode()
    return (await catalog.shared_secret(_SIGNING_KEY)).encode()


def _programs(
    settings: Settings,
    provider: SessionProvider,
    *,
    engine: AsyncEngine,
    catalog: Catalog,
    authenticator: Authenticator,
    url: str,
) -> Programs:
    return Programs(
        records=ProgramCatalog(engine),
        catalog=catalog,
        authenticator=authenticator,
        runner=_program_runner(settings, provider),
        settings=settings,
        server_url=url,
    )


def _program_runner(settings: Settings, provider: SessionProvider) -> ProgramRunner:
    """Return the runner of programs for the configured provider."""
    if isinstance(provider, KubernetesProvider):
        return KubernetesPrograms(provider)
    return LocalPrograms(settings.state_dir.absolute() / "programs", settings.programs)
