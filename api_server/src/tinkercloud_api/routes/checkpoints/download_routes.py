"""URLs for downloading checkpoints, and the downloads themselves, which need no API key."""

import re
from collections.abc import Iterable
from datetime import datetime
from email.utils import format_datetime
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_api.transfers import byte_ranges, signed_urls
from tinkercloud_api.transfers.byte_ranges import RangeNotSatisfiable
from tinkercloud_api.transfers.downloads import Content
from tinkercloud_api.transfers.signed_urls import Grant
from tinkercloud_api.web.asgi_http import respond_error
from tinkercloud_api.web.statuses import statuses
from tinkercloud_protocol.responses.listings import ArchiveUrl, ExternalWeightsUrls
from tinkercloud_protocol.wire.asgi import Receive, Scope, Send
from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_protocol.wire.paths import CheckpointPath, parse_kind

log = structlog.get_logger(__name__)

router = APIRouter(tags=["downloads"])

_RUNS = "/api/v1/training_runs"
_FILE = signed_urls.PREFIX + "/{run_id}/{kind}/{name}/{file}"
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?|\[[0-9A-Fa-f:.]+\](:[0-9]+)?")
_ARCHIVES = {"application/gzip", "application/tar", "application/x-tar"}
_NO_STORE = {"Cache-Control": "no-store"}
"""The responses contain URLs that are as good as a key until they expire."""


@router.get(_RUNS + "/{run_id}/checkpoints/{checkpoint_id:path}/external_weights_urls")
async def external_weights_urls(
    run_id: str,
    checkpoint_id: str,
    *,
    request: Request,
    response: Response,
    server: Server,
    caller: Caller,
) -> ExternalWeightsUrls:
    """Return a URL for each file of external weights, which needs no API key until it expires."""
    path = CheckpointPath.of_checkpoint_id(run_id, checkpoint_id)
    response.headers.update(_NO_STORE)
    return await server.downloads.file_urls(path, caller, base_url(request, server))


@router.get(
    _RUNS + "/{run_id}/checkpoints/{checkpoint_id:path}/archive",
    response_model=ArchiveUrl,
    responses=statuses("302"),
)
async def archive(
    run_id: str, checkpoint_id: str, request: Request, server: Server, caller: Caller
) -> Response:
    """Return the URL of a checkpoint's weights as a tar file.

    The response is a redirect to it if the request accepts archives, as in SDKs before 0.22.
    """
    path = CheckpointPath.of_checkpoint_id(run_id, checkpoint_id)
    answer = await server.downloads.archive_url(path, caller, base_url(request, server))
    if not accepts_archive(request.headers.getlist("accept")):
        return JSONResponse(answer.model_dump(mode="json"), headers=_NO_STORE)
    headers = {"Location": answer.url, "Expires": _http_date(answer.expires), **_NO_STORE}
    return Response(status_code=302, headers=headers)


async def checked_grant(
    *,
    run_id: str,
    kind: str,
    name: str,
    file: str,
    owner: str,
    saved: int,
    expires: int,
    signature: str,
    server: Server,
) -> Grant:
    """Return what a signed URL allows (a FastAPI dependency).

    Raises:
        InvalidSignature: the URL was changed.
        UrlGone: it has expired.
    """
    path = CheckpointPath(run_id, parse_kind(kind), name)
    grant = Grant(path, file, saved, owner, expires)
    signed_urls.check(server.downloads.key, grant, signature, now())
    return grant


@router.head(_FILE, include_in_schema=False)
@router.get(
    _FILE,
    response_class=StreamingResponse,
    responses=statuses("206", "304", "400", "403", "404", "410", "416", "429", "503"),
)
async def download(
    grant: Annotated[Grant, Depends(checked_grant)], request: Request, server: Server
) -> Response:
    """Download a file by a signed URL, all of it or one range of bytes."""
    content = await server.downloads.content(grant)
    headers = _headers(content)
    if byte_ranges.is_unchanged(request.headers, content.etag):
        return Response(status_code=304, headers=headers)
    try:
        part = byte_ranges.requested(request.headers, content.size, content.etag, content.modified)
    except RangeNotSatisfiable as error:
        headers = {"Content-Range": f"bytes */{content.size}", "ETag": content.etag}
        return JSONResponse({"detail": error.message}, error.status, headers)
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{content.size}"
    status = 200 if part is None else 206
    whole = range(content.size) if part is None else part
    headers["Content-Length"] = str(len(whole))
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    return _Download(server, grant, content=content, part=whole, status=status, headers=headers)


class _Download(Response):
    """Streams a content while it holds a slot of the owner."""

    def __init__(
        self,
        server: Context,
        grant: Grant,
        *,
        content: Content,
        part: range,
        status: int,
        headers: dict[str, str],
    ) -> None:
        super().__init__(status_code=status, headers=headers)
        self._downloads = server.downloads
        self._grant = grant
        self._content = content
        self._part = part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, or the error of an object that can't be read."""
        has_started = False
        try:
            async with self._downloads.slots.hold(self._grant.owner):
                stream = await self._downloads.open(self._content, self._part)
                streaming = StreamingResponse(stream, self.status_code)
                streaming.raw_headers = self.raw_headers
                has_started = True
                await streaming(scope, receive, send)
        except WireError as error:
            if not has_started:
                await respond_error(send, error)
                return
            # The server closes the connection of an incomplete response.
            log.warning(
                "download aborted",
                path=str(self._grant.path),
                file=self._grant.file,
                error=str(error),
            )


def base_url(request: Request, server: Context) -> str:
    """Return the address of this server for the caller, without a slash at its end.

    Unless it is configured, it is where the caller sent the request, also if a proxy received it:
    only the caller, who sent these headers, gets to see the result.
    """
    if server.settings.public_url is not None:
        return server.settings.public_url.rstrip("/")
    forwarded = {
        name: request.headers.get(f"x-forwarded-{name}", "").partition(",")[0].strip()
        for name in ("proto", "host")
    }
    scheme = forwarded["proto"] if forwarded["proto"] in {"http", "https"} else request.url.scheme
    host = forwarded["host"] if _HOST.fullmatch(forwarded["host"]) else request.url.netloc
    return f"{scheme}://{host}"


def accepts_archive(accept: Iterable[str]) -> bool:
    """Return whether Accept headers, of which there may be several, name a type of archives."""
    kinds = {each.partition(";")[0].strip().lower() for each in ",".join(accept).split(",")}
    return not _ARCHIVES.isdisjoint(kinds)


def _headers(content: Content) -> dict[str, str]:
    return {
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-store",
        "Content-Disposition": f'attachment; filename="{content.name}"',
        "Content-Type": "application/octet-stream",
        "ETag": content.etag,
        "Last-Modified": _http_date(content.modified),
        "X-Content-Type-Options": "nosniff",
    }


def _http_date(moment: datetime) -> str:
    return format_datetime(moment, usegmt=True)
