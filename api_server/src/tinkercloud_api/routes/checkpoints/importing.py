"""Checkpoints that come from elsewhere: copies of other checkpoints, and uploads of adapters."""

from typing import Annotated
from urllib.parse import parse_qsl

import structlog
from fastapi import APIRouter, Header, Request

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import changes, declares, names_no_object
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_api.routes.checkpoints.download_routes import base_url
from tinkercloud_api.routes.requests.call import Call
from tinkercloud_api.transfers import upload_urls
from tinkercloud_api.transfers.copies import CopyWeightsRequest
from tinkercloud_api.transfers.imports import StartExternalUpload, StartUpload
from tinkercloud_api.transfers.signed_urls import InvalidSignature
from tinkercloud_protocol.heads.checkpoint_manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CheckpointManifest,
)
from tinkercloud_protocol.responses.listings import (
    CopyWeightsAnswer,
    ExternalUploadStarted,
    UnfinishedUpload,
    UnfinishedUploads,
    UploadFinished,
    UploadStarted,
    UploadTarget,
)
from tinkercloud_protocol.wire.asgi import Scope, check_encoding, respond
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.json_model import Name, WireModel

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/api/v1", tags=["training runs"])

UPLOADS = "/api/v1/checkpoints/uploads/"
"""Prefix of the paths of uploads, which contain the upload's id."""
_WITH_HEADERS = (0, 40)
"""SDK version since which each URL of an upload comes with the headers to send."""
SdkVersion = Annotated[str, Header(alias="x-sdk-version", max_length=64)]
Token = Annotated[str | None, Header(alias="X-Tinker-Weights-Access-Token", max_length=256)]
IdempotencyKey = Annotated[str | None, Header(alias="X-Idempotency-Key", max_length=256)]


class FinishExternalUpload(WireModel):
    """POST external_weights_upload_finish."""

    upload_id: Name


@router.post("/copy_weights")
@declares(changes("checkpoint_copy"))
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
    caller.named_objects.add(path)
    log.info("checkpoint copied", source=request.source_path, path=path, owner=caller.owner)
    return CopyWeightsAnswer(tinker_path=path)


@router.post("/checkpoints/uploads")
@declares(changes("checkpoint_import"))
async def start_upload(request: StartUpload, server: Server, caller: Caller) -> UploadStarted:
    """Start to import a PEFT adapter. PUT its file to the returned path, then finish."""
    upload = await server.imports.start(request, caller)
    caller.named_objects.add(upload.id)
    urls = {ADAPTER_WEIGHTS: f"{UPLOADS}{upload.id}/{ADAPTER_WEIGHTS}"}
    return UploadStarted(upload_id=upload.id, urls=urls, expires=upload.expires_at)


@router.get("/checkpoints/uploads")
@names_no_object
async def list_uploads(server: Server, caller: Caller) -> UnfinishedUploads:
    """List the caller's unfinished uploads, which count in the owner's limit."""
    found = []
    for upload in await server.imports.unfinished(caller):
        manifest = CheckpointManifest.model_validate(upload.manifest)
        entry = UnfinishedUpload(
            upload_id=upload.id,
            base_model=manifest.base_model,
            name=manifest.path.name,
            size_bytes=upload.size_bytes,
            is_received=bool(manifest.files),
            expires=upload.expires_at,
        )
        found.append(entry)
    return UnfinishedUploads(uploads=found)


@router.post("/checkpoints/uploads/{upload_id}/finish")
@declares(changes("checkpoint_import"))
async def finish_upload(upload_id: str, server: Server, caller: Caller) -> UploadFinished:
    """Make a training checkpoint of an uploaded adapter."""
    path = await server.imports.finish(upload_id, caller)
    caller.named_objects.add(path)
    log.info("adapter imported", path=path)
    return UploadFinished(tinker_path=path)


@router.delete("/checkpoints/uploads/{upload_id}")
@declares(changes("checkpoint_import"))
async def abort_upload(upload_id: str, server: Server, caller: Caller) -> dict[str, str]:
    """Delete an upload that is not finished."""
    await server.imports.abort(upload_id, caller)
    return {}


async def receive_file(call: Call) -> None:
    """Receive a file of an upload, by the URL that starting it returned.

    Outside FastAPI, whose bodies are small.
    """
    request, imports = call.request, call.server.imports
    check_encoding(request.headers)
    upload_id, name = request.path.split("/")[-2:]
    if name == ADAPTER_WEIGHTS:
        declared = request.headers.get("content-length", "")
        length = int(declared) if declared.isdecimal() else None
        await imports.receive(upload_id, call.principal, request.chunks(), length)
    elif name == ADAPTER_CONFIG:
        await imports.receive_config(upload_id, call.principal, await request.body())
    else:
        raise NotFound(
            f"PUT {request.path}: the files to upload are {ADAPTER_WEIGHTS} and {ADAPTER_CONFIG}"
        )
    await respond(call.send, b"{}")


def url_holder(server: Context, scope: Scope) -> Principal:
    """Return the caller that the signed URL of a file stands for.

    Raises:
        InvalidSignature: the URL was changed.
        UrlGone: it has expired.
    """
    try:
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=8))
    except ValueError:
        raise InvalidSignature("the URL of the upload was changed") from None
    return upload_urls.holder(server.downloads.key, scope["path"], query, now())


@router.post("/external_weights_upload_start")
@declares(changes("checkpoint_import"))
async def external_weights_upload_start(
    request: StartExternalUpload,
    *,
    http: Request,
    server: Server,
    caller: Caller,
    sdk_version: SdkVersion = "",
) -> ExternalUploadStarted:
    """Start to upload an adapter of PEFT by signed URLs, as SDK 0.39 does."""
    upload = await server.imports.start_external(request, caller)
    caller.named_objects.add(upload.id)
    urls = {
        name: upload_urls.upload_url(
            base_url(http, server),
            server.downloads.key,
            upload_id=upload.id,
            file=name,
            owner=upload.owner,
            expires=int(upload.expires_at.timestamp()),
        )
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    }
    targets: dict[str, str | UploadTarget] = {**urls}
    if _version(sdk_version) >= _WITH_HEADERS:
        targets = {name: UploadTarget(url=url) for name, url in urls.items()}
    return ExternalUploadStarted(upload_id=upload.id, urls=targets, expires=upload.expires_at)


@router.post("/external_weights_upload_finish")
@declares(changes("checkpoint_import"))
async def external_weights_upload_finish(
    request: FinishExternalUpload, server: Server, caller: Caller
) -> UploadFinished:
    """Make a training checkpoint of an adapter that was uploaded by signed URLs."""
    return await finish_upload(request.upload_id, server, caller)


def _version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of an SDK's version; (0, 0) if it has another form."""
    numbers = text.split(".")[:2]
    is_version = len(numbers) == 2 and all(each.isdecimal() and len(each) < 9 for each in numbers)
    return tuple(map(int, numbers)) if is_version else (0, 0)
