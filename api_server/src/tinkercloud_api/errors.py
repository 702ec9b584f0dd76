"""Exception handlers of the JSON routes; the hot paths handle theirs in `hot_paths`."""

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from tinkercloud_protocol.errors import WireError
from tinkercloud_protocol.wire import describe, sentences

log = structlog.get_logger(__name__)


def install(app: FastAPI) -> None:
    """Install handlers that respond to all errors in the SDK's format, `{"detail": ...}`."""
    app.add_exception_handler(WireError, _wire_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


async def _wire_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, WireError)  # noqa: S101 - registered for this class
    headers = {"retry-after": "1"} if error.status in {429, 503} else None
    return JSONResponse({"detail": error.message}, error.status, headers)


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this class
    # The first part of a location is where a field came from (body, query). For invalid JSON, the
    # location is a character position.
    faults = [
        {**fault, "loc": () if fault["type"] == "json_invalid" else fault["loc"][1:]}
        for fault in error.errors()
    ]
    return JSONResponse({"detail": sentences(faults, "request body")}, 400)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class
    if error.status_code in {404, 405}:
        # A path that is served with another method is an unknown call as well.
        detail = (
            f"{request.method} {request.url.path} is not supported by this server;"
            " docs/use/sdk.md lists the supported calls"
        )
        return JSONResponse({"detail": detail}, 404)
    detail = error.detail
    if isinstance(error.__cause__, RecursionError):
        detail = "request body: JSON is nested too deeply; send only the fields of this call"
    elif isinstance(error.__cause__, UnicodeDecodeError):
        detail = "request body: not UTF-8; send uncompressed JSON in UTF-8"
    return JSONResponse({"detail": detail}, error.status_code, error.headers)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, ValidationError):
        return JSONResponse({"detail": describe(error, "request body")}, 400)
    log.error("unexpected error while handling a request", path=request.url.path, exc_info=error)
    return JSONResponse({"detail": "internal error; see the server log for details"}, 500)
