"""Health that means ready: the catalog and the object store answer."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from tinkercloud_api.context import Server
from tinkercloud_protocol.errors import Unavailable

router = APIRouter(tags=["health"])


@router.get("/livez")
async def live() -> dict[str, str]:
    """Answer as long as the process serves."""
    return {"status": "ok"}


@router.get("/healthz")
@router.get("/api/v1/healthz")
async def healthy(server: Server) -> JSONResponse:
    """Answer 200 if requests can be served, 503 with the reason if not."""
    try:
        await server.catalog.ping()
        await server.checkpoints.ping()
    except Unavailable as error:
        return JSONResponse({"status": "unavailable", "detail": error.message}, 503)
    return JSONResponse({"status": "ok"})
