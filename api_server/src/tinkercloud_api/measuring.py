"""Measures every request, and shows what was counted: /metrics, on a port of its own.

The port is apart from the API's, so that no ingress can expose it.
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp

from tinkercloud_api import metrics
from tinkercloud_api.http import Receive, Scope, Send

_UNKNOWN_ROUTE = "other"
_NO_ANSWER = "aborted"


class MetricsMiddleware:
    """ASGI middleware, outside of everything: counts and times requests by route and status."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        """Wrap an application.

        Args:
            app: serves the requests.
            paths: those that are routes as they are; other routes are named by FastAPI, by their
                templates, so that what clients write into paths makes no series.
        """
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = perf_counter(), _NO_ANSWER

        async def noted(message: Any) -> None:  # noqa: ANN401 - any ASGI message
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            route = self._route(scope)
            metrics.HTTP_REQUESTS.labels(route, status).inc()
            metrics.HTTP_SECONDS.labels(route).observe(perf_counter() - began)

    def _route(self, scope: Scope) -> str:
        path: str = scope["path"]
        if path in self._paths:
            return path
        return getattr(scope.get("route"), "path", _UNKNOWN_ROUTE)


@asynccontextmanager
async def metrics_server(host: str, port: int | None) -> AsyncIterator[None]:
    """Serve /metrics as long as the context lasts; None for a port means nowhere.

    Raises:
        OSError: the port can't be listened on.
    """
    if port is None:
        yield
        return
    app = web.Application()
    app.router.add_get("/metrics", _show)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()


async def _show(_request: web.Request) -> web.Response:
    return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})
