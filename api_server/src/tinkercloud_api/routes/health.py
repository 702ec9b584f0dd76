"""Health checks. The server is healthy if the catalog and the checkpoint store respond."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from tinkercloud_api.context import Server
from tinkercloud_protocol.errors import Unavailable

router = APIRouter(tags=["health"])


@router.get("/livez")
async def live() -> dict[str, str]:
    """Respond as long as the process serves requests."""
    return {"status": "ok"}


@router.get("/healthz")
@router.get("/api/v1/healthz")
async def healthy(server: Server) -> JSONResponse:
    """Return 200 if the server is ready, otherwise 503 with the reason."""
    try:
        await server.catalog.ping()
        await server.checkpoints.ping()
    except Unavailable as error:
        return JSONResponse({"status": "unavailable", "detail": error.message}, 503)
    return JSONResponse({"status": "ok"})
