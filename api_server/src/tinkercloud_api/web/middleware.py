"""ASGI middleware of the JSON routes, and the /metrics server.

/metrics is served on a port of its own, apart from the API's, so that no ingress can expose it.
"""

from collections.abc import Callable, Collection, MutableMapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from tinkercloud_api.config import api_metrics
from tinkercloud_api.web.asgi_http import respond_error
from tinkercloud_protocol.responses import chat_errors
from tinkercloud_protocol.wire import request_ids, routes
from tinkercloud_protocol.wire.asgi import Receive, Scope, Send, check_encoding
from tinkercloud_protocol.wire.errors import BodyTooLarge, InvalidRequest

if TYPE_CHECKING:
    from tinkercloud_api.web.request_spans import RequestSpans

_UNKNOWN_ROUTE = "other"
_ABORTED = "aborted"


_SHORT = "/v1/"
_SDK_BELOW_SHORT = "/v1/api/"


class ShortPathMiddleware:
    """Serves /v1 like the paths of OpenAI's or Anthropic's API, as clients of both begin with it.

    Messages are Anthropic's, and so is what has the header of its clients.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        path: str = scope.get("path", "")
        if path.startswith(_SHORT) and not path.startswith(_SDK_BELOW_SHORT):
            is_anthropic = f"{path}/".startswith("/v1/messages/") or any(
                name == b"anthropic-version" for name, _ in scope["headers"]
            )
            base = routes.ANTHROPIC if is_anthropic else routes.OPENAI.removesuffix("/v1")
            raw = base.encode() + scope.get("raw_path", path.encode())
            scope = {**scope, "path": base + path, "raw_path": raw}
        await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """Rejects bodies over the limit with 413, without reading the rest; compressed ones with 400.

    It runs before anything parses the body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if (encoding := headers.get(b"content-encoding")) is not None:
            try:
                check_encoding({"content-encoding": encoding.decode("latin-1")})
            except InvalidRequest as error:
                await respond_error(send, error)
                return
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await respond_error(send, BodyTooLarge(self._message()))
            return
        size = 0

        async def receive_counted() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                # The one exception FastAPI lets through while it reads a body.
                raise HTTPException(BodyTooLarge.status, self._message())
            return message

        await self._app(scope, receive_counted, send)

    def _message(self) -> str:
        return f"request body: larger than {self._max_bytes} bytes; send less data per request"


class RequestIdMiddleware:
    """Names each request, in its response and in log lines. This is the outermost middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(request_ids.HEADER.encode(), b"")
        name = request_ids.name_of(given.decode("latin-1"))
        named = [(request_ids.HEADER.encode(), name.encode())]
        if scope["path"].startswith(chat_errors.ANTHROPIC):
            named.append((request_ids.ANTHROPIC_HEADER.encode(), name.encode()))

        async def send_named(message: Any) -> None:  # noqa: ANN401 - any ASGI message
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        with structlog.contextvars.bound_contextvars(**{request_ids.LOG_FIELD: name}):
            await self._app(scope, receive, send_named)


class MetricsMiddleware:
    """Counts and times requests by route and status, and makes spans of them."""

    def __init__(self, app: ASGIApp, paths: Collection[str], spans: "RequestSpans | None") -> None:
        """Wrap an application.

        Args:
            app: serves the requests.
            paths: paths that are used as route labels unchanged. FastAPI names all other routes by
                their templates, so that path parameters from clients create no time series.
            spans: makes spans of requests; None: nothing receives them.
        """
        self._app = app
        self._paths = paths
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = perf_counter(), _ABORTED

        async def send_recorded(message: Any) -> None:  # noqa: ANN401 - any ASGI message
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        def answer() -> tuple[str, str]:
            return self._route(scope), status

        try:
            with nullcontext() if self._spans is None else self._spans.around(scope, answer):
                await self._app(scope, receive, send_recorded)
        finally:
            route, _ = answer()
            api_metrics.HTTP_REQUESTS.labels(route, status).inc()
            api_metrics.HTTP_SECONDS.labels(route).observe(perf_counter() - started)

    def _route(self, scope: Scope) -> str:
        path: str = scope["path"]
        if path in self._paths:
            return path
        return getattr(scope.get("route"), "path", _UNKNOWN_ROUTE)


class MetricsServer:
    """Serves /metrics and /heads.

    /heads lists the session heads for Prometheus (`http_sd_configs`): their ports change.
    """

    def __init__(self, heads: Callable[[], Sequence[str]]) -> None:
        """Prepare the server; `heads` returns the URLs of the running heads."""
        self._heads = heads
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/heads", self._targets)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str, port: int | None) -> None:
        """Listen on a port; None: nothing is served.

        Raises:
            OSError: the port is not available.
        """
        if port is not None:
            await self._runner.setup()
            await web.TCPSite(self._runner, host, port).start()

    async def stop(self) -> None:
        """Stop listening, if it does."""
        await self._runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _targets(self, _request: web.Request) -> web.Response:
        found = [url.partition("://")[2] for url in self._heads()]
        return web.json_response([{"targets": found}])
