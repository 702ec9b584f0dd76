"""Health checks. The server is healthy if the catalog and the checkpoint store respond.

It is ready without the checkpoint store: training and sampling need it only now and then, and do
not stop while it fails.
"""

from importlib.metadata import version

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_api.routes.account.session_usage import LIVE
from tinkercloud_api.web.statuses import statuses
from tinkercloud_protocol.responses.listings import ServerHealth
from tinkercloud_protocol.wire.errors import Unavailable

router = APIRouter(tags=["health"])


@router.get("/livez")
async def live() -> dict[str, str]:
    """Respond as long as the process serves requests."""
    return {"status": "ok"}


@router.get("/healthz", responses=statuses("503"))
@router.get("/api/v1/healthz", responses=statuses("503"))
async def healthy(server: Server) -> JSONResponse:
    """Return 200 if nothing fails, otherwise 503 with the reason."""
    return await _checked("ok", server)


@router.get("/readyz", responses=statuses("503"))
async def ready(server: Server) -> dict[str, str]:
    """Return 200 if the server should receive requests, otherwise 503 with the reason."""
    await server.catalog.ping()
    return {"status": "ok"}


@router.get("/health", responses=statuses("503"))
async def health(server: Server) -> JSONResponse:
    """Return the same with the status `healthy`, as other servers of this API do."""
    return await _checked("healthy", server)


@router.get("/api/v1/health")
@names_no_object
async def health_of_caller(server: Server, caller: Caller) -> ServerHealth:
    """Count the models in memory and the active sessions that the caller can see."""
    await server.catalog.ping()
    owner = caller.owner_filter("accessible")
    held = await server.shared_heads.models()
    in_memory = {name for name, model in held.items() if not model.is_suspended}
    in_memory.update(server.provider.runs())
    failing = {name for name, model in held.items() if model.autosave_failure is not None}
    degraded = {name for name, model in held.items() if model.degraded is not None}
    degraded.update(server.provider.degraded())
    is_local = server.settings.provider == "local"
    level = server.settings.durability.level if is_local else "none"
    num_degraded = await server.catalog.count_runs_named(degraded, owner)
    num_failing = await server.catalog.count_runs_named(failing, owner)
    store_failure = await _failure_of_store(server)
    return ServerHealth(
        status="degraded" if num_degraded or num_failing or store_failure else "healthy",
        version=version("tinkercloud-api"),
        ray_status="not used" if is_local else "per session",
        active_models=await server.catalog.count_runs_named(in_memory, owner),
        failing_autosaves=num_failing,
        durability="degraded" if num_degraded else level,
        active_sessions=await server.catalog.count_active_sessions(now() - LIVE, owner),
        checkpoint_store_failure=store_failure,
    )


async def _failure_of_store(server: Context) -> str | None:
    try:
        await server.checkpoints.ping()
    except Unavailable as error:
        return error.message
    return None


async def _checked(status: str, server: Context) -> JSONResponse:
    failure = await server.health.failure()
    if failure is not None:
        return JSONResponse({"status": "unavailable", "detail": failure}, 503)
    return JSONResponse({"status": status})
