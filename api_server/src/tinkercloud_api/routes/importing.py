"""Checkpoints that come from elsewhere: copies of other checkpoints, and uploads of adapters."""

from typing import Annotated

import structlog
from fastapi import APIRouter, Header

from tinkercloud_api.context import Caller, Server
from tinkercloud_api.copies import CopyWeightsRequest
from tinkercloud_api.imports import StartUpload
from tinkercloud_api.routes.call import Call
from tinkercloud_protocol.asgi import check_encoding, respond
from tinkercloud_protocol.checkpoints import ADAPTER_WEIGHTS
from tinkercloud_protocol.errors import NotFound
from tinkercloud_protocol.listings import CopyWeightsAnswer, UploadFinished, UploadStarted

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/api/v1", tags=["training runs"])

UPLOADS = "/api/v1/checkpoints/uploads/"
"""Prefix of the paths of uploads, which contain the upload's id."""
Token = Annotated[str | None, Header(alias="X-Tinker-Weights-Access-Token", max_length=256)]
IdempotencyKey = Annotated[str | None, Header(alias="X-Idempotency-Key", max_length=256)]


@router.post("/copy_weights")
async def copy_weights(
    request: CopyWeightsRequest,
    server: Server,
    caller: Caller,
    token: Token = None,
    key: IdempotencyKey = None,
) -> CopyWeightsAnswer:
    """Copy a checkpoint that the caller, or the holder of the access token, may read."""
    reader = await server.authenticator.reader(caller, token or request.weights_access_token)
    path = await server.copies.copy(request, key, caller, reader)
    log.info("checkpoint copied", source=request.source_path, path=path, owner=caller.owner)
    return CopyWeightsAnswer(tinker_path=path)


@router.post("/checkpoints/uploads")
async def start_upload(request: StartUpload, server: Server, caller: Caller) -> UploadStarted:
    """Start to import a PEFT adapter. PUT its file to the returned path, then finish."""
    upload = await server.imports.start(request, caller)
    urls = {ADAPTER_WEIGHTS: f"{UPLOADS}{upload.id}/{ADAPTER_WEIGHTS}"}
    return UploadStarted(upload_id=upload.id, urls=urls, expires=upload.expires_at)


@router.post("/checkpoints/uploads/{upload_id}/finish")
async def finish_upload(upload_id: str, server: Server, caller: Caller) -> UploadFinished:
    """Make a training checkpoint of an uploaded adapter."""
    path = await server.imports.finish(upload_id, caller)
    log.info("adapter imported", path=path)
    return UploadFinished(tinker_path=path)


@router.delete("/checkpoints/uploads/{upload_id}")
async def abort_upload(upload_id: str, server: Server, caller: Caller) -> dict[str, str]:
    """Delete an upload that is not finished."""
    await server.imports.abort(upload_id, caller)
    return {}


async def receive_file(call: Call) -> None:
    """Receive the file of an upload: PUT checkpoints/uploads/{id}/adapter_model.safetensors.

    Outside FastAPI, whose bodies are small.
    """
    check_encoding(call.request.headers)
    upload_id, _, name = call.request.path.removeprefix(UPLOADS).partition("/")
    if name != ADAPTER_WEIGHTS:
        raise NotFound(f"PUT {call.request.path}: the only file to upload is {ADAPTER_WEIGHTS}")
    await call.server.imports.receive(upload_id, call.principal, call.request.chunks())
    await respond(call.send, b"{}")
