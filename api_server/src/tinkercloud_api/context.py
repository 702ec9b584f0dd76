"""The components of a running server, created at startup and passed to request handlers."""

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from tinkercloud_api.access.auditing import Auditing
from tinkercloud_api.access.auth import Authenticator, Principal
from tinkercloud_api.access.browser_sessions import BrowserSessions
from tinkercloud_api.access.owner_tenants import Tenants
from tinkercloud_api.access.project_rights import Projects
from tinkercloud_api.catalog.runs.logged_values import LoggedValues
from tinkercloud_api.catalog.runs.run_points import RunPoints
from tinkercloud_api.catalog.runs.sample_texts import SampleTexts
from tinkercloud_api.catalog.runs.sampler_clients import SamplerClients
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.usage.billing_rows import Billing
from tinkercloud_api.catalog.usage.usage_ledger import UsageLedger
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.heads.activity import Activity
from tinkercloud_api.heads.deliveries import Deliveries
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.heads.proxy import Proxy
from tinkercloud_api.heads.sampled_runs import SampledRuns
from tinkercloud_api.heads.shared_heads import SharedHeads
from tinkercloud_api.providers.base import SessionProvider
from tinkercloud_api.runs.base_models import BaseModels
from tinkercloud_api.runs.direct_sessions import DirectSessions
from tinkercloud_api.runs.first_seen import FirstSeen
from tinkercloud_api.runs.owner_programs import Programs
from tinkercloud_api.runs.quota_listing import Quotas
from tinkercloud_api.runs.run_control import Runs
from tinkercloud_api.runs.sampling_sessions import SamplingSessions
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_api.runs.uploaded_losses import CustomLosses
from tinkercloud_api.transfers.copies import Copies
from tinkercloud_api.transfers.downloads import Downloads
from tinkercloud_api.transfers.imports import Imports
from tinkercloud_api.transfers.stored_runs import StoredRuns
from tinkercloud_api.web.asgi_http import key_of
from tinkercloud_api.web.health_checks import HealthChecks
from tinkercloud_api.web.long_polls import LongPolls


@dataclass(frozen=True, slots=True)
class Context:
    """The components of a running server."""

    settings: Settings
    catalog: Catalog
    authenticator: Authenticator
    provider: SessionProvider
    base_models: BaseModels
    checkpoints: Checkpoints
    downloads: Downloads
    locator: HeadLocator
    training_runs: TrainingRuns
    runs: Runs
    proxy: Proxy
    activity: Activity
    shared_heads: SharedHeads
    long_polls: LongPolls
    programs: Programs
    stored_runs: StoredRuns
    copies: Copies
    imports: Imports
    deliveries: Deliveries
    direct_sessions: DirectSessions
    sampling_sessions: SamplingSessions
    browsers: BrowserSessions
    usage: UsageLedger
    points: RunPoints
    logged: LoggedValues
    samples: SampleTexts
    sampled_runs: SampledRuns
    sampler_clients: SamplerClients
    custom_losses: CustomLosses
    tenants: Tenants
    quotas: Quotas
    auditing: Auditing
    billing: Billing
    projects: Projects
    health: HealthChecks
    first_seen: FirstSeen = field(default_factory=FirstSeen)


def get_context(request: Request) -> Context:
    """Return the server's components (a FastAPI dependency)."""
    context: Context = request.app.state.context
    return context


Server = Annotated[Context, Depends(get_context)]


async def get_principal(server: Server, request: Request) -> Principal:
    """Return the caller, as the hot paths have authenticated it (a FastAPI dependency).

    Raises:
        Unauthenticated: the key is missing, unknown or revoked.
    """
    found = request.scope.get("principal")
    if isinstance(found, Principal):
        return found
    return await server.authenticator.principal(key_of(request.scope["headers"]))


Caller = Annotated[Principal, Depends(get_principal)]
