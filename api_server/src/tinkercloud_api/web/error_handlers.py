"""Exception handlers of the JSON routes; the hot paths handle theirs in `hot_paths`."""

from collections.abc import Iterable, Iterator
from http import HTTPStatus

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from tinkercloud_api.web.session_cookie import CONSOLE
from tinkercloud_protocol.responses import chat_errors
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.asgi import error_headers
from tinkercloud_protocol.wire.errors import MethodNotAllowed, NotFound, WireError
from tinkercloud_protocol.wire.json_model import describe, sentences

log = structlog.get_logger(__name__)

_FRONT_DOORS = frozenset({"/", "/docs", "/ui"})
"""Paths that people try first, with a browser."""


def install(app: FastAPI) -> None:
    """Install handlers that respond to all errors in the SDK's format, `{"detail": ...}`."""
    app.add_exception_handler(WireError, _wire_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


async def _wire_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, WireError)  # noqa: S101 - registered for this class
    return JSONResponse({"detail": error.message}, error.status, error_headers(error))


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this class
    # The first part of a location is where a field came from (body, query). For invalid JSON, the
    # location is a character position.
    faults = [
        {**fault, "loc": () if fault["type"] == "json_invalid" else fault["loc"][1:]}
        for fault in error.errors()
    ]
    return JSONResponse({"detail": sentences(faults, "request body")}, 400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class
    if error.status_code == 405:
        # The framework's own error only has the methods of the first route at this path.
        allowed = allowed_methods(request.app.routes, request.scope)
        return await _wire_error(
            request, MethodNotAllowed(request.method, request.url.path, allowed)
        )
    if error.status_code == 404:
        path = request.url.path
        if path in _FRONT_DOORS and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(CONSOLE, HTTPStatus.SEE_OTHER)
        detail = f"{request.method} {path} is not supported by this server; {_instead(path)}"
        # Clients of OpenAI's API with a wrong base URL show only their own shape.
        shape = chat_errors.error_object(path, NotFound(detail))
        is_chat = path.endswith(chat_errors.CALLS)
        return JSONResponse({"detail": detail, **(shape if is_chat else {})}, 404)
    detail = error.detail
    if isinstance(error.__cause__, RecursionError):
        detail = "request body: JSON is nested too deeply; send only the fields of this call"
    elif isinstance(error.__cause__, UnicodeDecodeError):
        detail = "request body: not UTF-8; send uncompressed JSON in UTF-8"
    return JSONResponse({"detail": detail}, error.status_code, error.headers)


def allowed_methods(served: Iterable[BaseRoute], scope: Scope) -> set[str]:
    """Return the methods with which a path is served; none if it is unknown."""
    return {
        method
        for route in flat(served)
        if route.matches(scope)[0] is not Match.NONE
        for method in getattr(route, "methods", None) or ()
    }


def flat(served: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """Yield routes, and those of included routers, which FastAPI keeps apart."""
    for route in served:
        router = getattr(route, "original_router", None)
        yield from [route] if router is None else flat(router.routes)


def _instead(path: str) -> str:
    """Return what to use instead of a path that people try first."""
    if path in _FRONT_DOORS:
        return (
            "this is a Tinkercloud server, for clients with its address in TINKER_BASE_URL and a"
            f" key in TINKER_API_KEY. OPENAI_BASE_URL is its address with {routes.OPENAI},"
            f" ANTHROPIC_BASE_URL with {routes.ANTHROPIC}; /openapi.json describes its calls,"
            " /healthz its state, and /console is for browsers"
        )
    if path.endswith(chat_errors.CALLS):
        return chat_errors.BASE_URLS
    if routes.PREFIX in path[1:] and not path.startswith((routes.OPENAI, routes.ANTHROPIC)):
        return "the base URL of the SDK and of `tinkercloud` is the server's address without a path"
    if path == "/login":
        return "logins are off: an operator turns them on with TINKERCLOUD_OIDC"
    if path == "/metrics":
        return "metrics have a port of their own, TINKERCLOUD_METRICS_PORT"
    if path == "/v1":
        return chat_errors.BASE_URLS
    return "docs/use/sdk.md lists the supported calls, and /openapi.json describes them"


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, ValidationError):
        return JSONResponse({"detail": describe(error, "request body")}, 400)
    log.error("unexpected error while handling a request", path=request.url.path, exc_info=error)
    return JSONResponse({"detail": "internal error; see the server log for details"}, 500)
