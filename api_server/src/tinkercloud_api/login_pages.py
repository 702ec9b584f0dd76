"""The pages below /login, for browsers. They load nothing and run no scripts.

A login starts with a POST of this page, so that no other site can make a browser start one. The key
is shown once: reloading the page shows an error, as its state has been used.
"""

import html
from urllib.parse import urlsplit

import structlog
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tinkercloud_api.auditing import Auditing
from tinkercloud_api.context import Context
from tinkercloud_api.login import CALLBACK, Logins
from tinkercloud_api.login_settings import OidcSettings
from tinkercloud_protocol.errors import Forbidden, WireError

log = structlog.get_logger(__name__)

_LOGIN = "/login"
PATHS = (_LOGIN, CALLBACK)
_SECRET = "login cookies"  # noqa: S105 - a name
"""Name of the secret in the catalog."""
_LOGIN_SECONDS = 600
"""How long a login may take, from the first page to the last."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Tinkercloud</title>
<style>body{{font:1rem system-ui;max-width:44rem;margin:4rem auto;padding:0 1rem}}
code{{display:block;padding:1rem;background:#eee;overflow-wrap:anywhere}}</style></head>
<body><h1>Tinkercloud</h1>{body}</body></html>"""
_START = '<form method="post" action=""><button>Log in</button></form>'


class LoginPages:
    """The application below /login, which exists once the server is running."""

    def __init__(self) -> None:
        self._app: Starlette | None = None

    async def open(self, server: Context, settings: OidcSettings, public_url: str) -> None:
        """Serve logins.

        Raises:
            OSError: the file with the secret cannot be read.
        """
        logins = Logins(settings, public_url, server.catalog)
        secret = await server.catalog.shared_secret(_SECRET)
        self._app = application(logins, server.auditing, secret, public_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (the ASGI entry point)."""
        assert self._app is not None  # noqa: S101 - requests arrive after startup
        await self._app(scope, receive, send)


def application(logins: Logins, auditing: Auditing, secret: str, public_url: str) -> Starlette:
    """Return the application below /login.

    Args:
        logins: talks to the provider.
        auditing: records logins.
        secret: signs the cookie; the same in all replicas.
        public_url: address of the server for browsers.
    """
    is_https = urlsplit(public_url).scheme == "https"

    async def show(_request: Request) -> Response:
        return _page(_START)

    async def start(request: Request) -> Response:
        if request.headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
            return _failure(Forbidden("logins start on this page; open /login in the browser"))
        try:
            answer = await logins.start(request)
        except WireError as error:
            return _failure(error)
        answer.status_code = 303
        return answer

    async def finish(request: Request) -> Response:
        try:
            key, row = await logins.finish(request)
            await auditing.record_login(row, request.client.host if request.client else "")
        except WireError as error:
            return _failure(error)
        ends = row.expires_at.isoformat(timespec="minutes") if row.expires_at else "never"
        return _page(
            f"<p>This is the API key of <b>{html.escape(row.owner)}</b>"
            f" (role {html.escape(row.role)}, until {ends}). It is not shown again.</p>"
            f"<code>{html.escape(key)}</code>"
            "<p>Set it as <b>TINKER_API_KEY</b>.</p>"
        )

    cookie = Middleware(
        SessionMiddleware,
        secret_key=secret,
        session_cookie="__Host-tinkercloud-login" if is_https else "tinkercloud-login",
        max_age=_LOGIN_SECONDS,
        same_site="lax",
        https_only=is_https,
    )
    return Starlette(
        routes=[
            Route(_LOGIN, show, methods=["GET"]),
            Route(_LOGIN, start, methods=["POST"]),
            Route(CALLBACK, finish, methods=["GET"]),
        ],
        middleware=[cookie],
    )


def _page(body: str, status: int = 200) -> HTMLResponse:
    return HTMLResponse(_PAGE.format(body=body), status_code=status, headers=_HEADERS)


def _failure(error: WireError) -> HTMLResponse:
    return _page(f"<p>{html.escape(error.message)}</p>", error.status)
