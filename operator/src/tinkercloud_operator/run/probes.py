"""/livez, /readyz and /metrics.

Alive: the event loop runs and watches deliver events. The latter is checked with the operator's own
Lease, which the leader renews every few seconds and also watches: if renewals succeed but no events
about them arrive, the watches have stalled and a restart fixes them. If the API server is
unreachable, neither happens, and the operator is not restarted.

Ready: this replica is on standby, or leads and has completed the initial list. Otherwise the
response contains the reason.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from time import monotonic

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tinkercloud_operator.run.leader import Leadership
from tinkercloud_operator.settings import Settings

_STALLED_SECONDS = 90.0
"""Longer than kopf takes to detect a dead stream (70 s)."""
_RENEWED_SECONDS = 10.0


class Probes:
    """Serves probes and metrics."""

    def __init__(self, leadership: Leadership, settings: Settings) -> None:
        self._leadership = leadership
        self._settings = settings
        self._last_event_at = monotonic()
        self.unready: Callable[[], str | None] = lambda: None
        """Returns why the leader does not reconcile sessions; None if it does."""

    def on_heartbeat(self) -> None:
        """Record that a watch has delivered an event, or was just opened."""
        self._last_event_at = monotonic()

    @property
    def is_stalled(self) -> bool:
        """Whether watches have stopped delivering events."""
        return (
            self._leadership.is_leader
            and self._leadership.seconds_since_renewal < _RENEWED_SECONDS
            and monotonic() - self._last_event_at > _STALLED_SECONDS
        )

    async def serve(self) -> web.AppRunner:
        """Start the server; the runner's `cleanup` stops it."""
        app = web.Application()
        for path, handler in ROUTES.items():
            app.router.add_get(path, partial(handler, self))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self._settings.probe_host, self._settings.probe_port).start()
        return runner

    async def _live(self, _request: web.Request) -> web.Response:
        if self.is_stalled:
            return web.Response(status=500, text="watches have stopped delivering")
        return web.Response(text="ok")

    async def _ready(self, _request: web.Request) -> web.Response:
        if not self._leadership.is_leader:
            return web.Response(text="standing by")
        unready = self.unready()
        return web.Response(text="leading") if unready is None else _unavailable(unready)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})


ROUTES: Mapping[str, Callable[[Probes, web.Request], Awaitable[web.Response]]] = {
    "/livez": Probes._live,
    "/readyz": Probes._ready,
    "/metrics": Probes._metrics,
}
"""All routes of the operator, for GET and for everybody; `make routes` prints them."""


def _unavailable(why: str) -> web.Response:
    return web.Response(status=503, text=why)
