"""The components of a running server, created at startup and passed to request handlers."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from tinkercloud_api.activity import Activity
from tinkercloud_api.auditing import Auditing
from tinkercloud_api.auth import Authenticator, Principal
from tinkercloud_api.catalog.billing import Billing
from tinkercloud_api.catalog.sampler_clients import SamplerClients
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.usage import UsageLedger
from tinkercloud_api.checkpoints import Checkpoints
from tinkercloud_api.custom_losses import CustomLosses
from tinkercloud_api.deliveries import Deliveries
from tinkercloud_api.direct_sessions import DirectSessions
from tinkercloud_api.head_locator import HeadLocator
from tinkercloud_api.http import key_of
from tinkercloud_api.long_polls import LongPolls
from tinkercloud_api.programs import Programs
from tinkercloud_api.projects import Projects
from tinkercloud_api.providers.base import SessionProvider
from tinkercloud_api.proxy import Proxy
from tinkercloud_api.quotas import Quotas
from tinkercloud_api.sampling_sessions import SamplingSessions
from tinkercloud_api.settings import Settings
from tinkercloud_api.shared_heads import SharedHeads
from tinkercloud_api.tenants import Tenants
from tinkercloud_api.training_runs import TrainingRuns
from tinkercloud_api.transfers.copies import Copies
from tinkercloud_api.transfers.downloads import Downloads
from tinkercloud_api.transfers.imports import Imports
from tinkercloud_api.transfers.stored_runs import StoredRuns


@dataclass(frozen=True, slots=True)
class Context:
    """The components of a running server."""

    settings: Settings
    catalog: Catalog
    authenticator: Authenticator
    provider: SessionProvider
    checkpoints: Checkpoints
    downloads: Downloads
    locator: HeadLocator
    training_runs: TrainingRuns
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
    usage: UsageLedger
    sampler_clients: SamplerClients
    custom_losses: CustomLosses
    tenants: Tenants
    quotas: Quotas
    auditing: Auditing
    billing: Billing
    projects: Projects


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
