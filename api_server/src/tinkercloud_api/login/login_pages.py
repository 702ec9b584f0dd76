"""The pages below /login, for browsers. They load nothing and run no scripts.

Logins and logouts start with a POST of this page, so that no other site can make a browser start
one. The cookie belongs to a login under way and gives no rights. The key is shown once: reloading
the page shows an error, as its state has been used.
"""

import html
from functools import partial
from urllib.parse import urlsplit

import structlog
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tinkercloud_api.access.auditing import Auditing
from tinkercloud_api.catalog.schema.tables import ApiKey
from tinkercloud_api.config.login_settings import OidcSettings
from tinkercloud_api.context import Context
from tinkercloud_api.login.openid_login import CALLBACK, Logins
from tinkercloud_protocol.wire.errors import Forbidden, WireError

log = structlog.get_logger(__name__)

_LOGIN = "/login"
_LOGOUT = "/login/logout"
PATHS = (_LOGIN, _LOGOUT, CALLBACK)
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
_START = """<form method="post" action=""><button>Log in</button></form>
<form method="post" action="login/logout"><p>If a key was lost or copied:
<button>End all keys from my logins</button></p></form>"""


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
        auditing: records logins and logouts.
        secret: signs the cookie; the same in all replicas.
        public_url: address of the server for browsers.
    """
    is_https = urlsplit(public_url).scheme == "https"

    async def show(_request: Request) -> Response:
        return _page(_START)

    async def start(request: Request, *, is_logout: bool) -> Response:
        # A browser that does not say where a request comes from could have been sent by any site.
        # It may start a login, whose key only its user sees, but end no keys.
        unknown = "cross-site" if is_logout else "none"
        if request.headers.get("sec-fetch-site", unknown) not in {"none", "same-origin"}:
            return _failure(Forbidden("this starts on the page /login; open it in the browser"))
        try:
            answer = await logins.start(request, is_logout=is_logout)
        except WireError as error:
            return _failure(error)
        answer.status_code = 303
        return answer

    async def finish(request: Request) -> Response:
        address = request.client.host if request.client else ""
        try:
            outcome = await logins.finish(request)
            if isinstance(outcome, str):
                await auditing.record_logout(outcome, address)
                await logins.end_keys(outcome)
                return _ended(outcome)
            key, row = outcome
            await auditing.record_login(row, address)
        except WireError as error:
            return _failure(error)
        return _issued(key, row)

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
            Route(_LOGIN, partial(start, is_logout=False), methods=["POST"]),
            Route(_LOGOUT, partial(start, is_logout=True), methods=["POST"]),
            Route(CALLBACK, finish, methods=["GET"]),
        ],
        middleware=[cookie],
    )


def _issued(key: str, row: ApiKey) -> HTMLResponse:
    ends = row.expires_at.isoformat(timespec="minutes") if row.expires_at else "never"
    return _page(
        f"<p>This is the API key of <b>{html.escape(row.owner)}</b>"
        f" (role {html.escape(row.role)}, until {ends}). It is not shown again.</p>"
        f"<code>{html.escape(key)}</code>"
        "<p>Set it as <b>TINKER_API_KEY</b>.</p>"
    )


def _ended(owner: str) -> HTMLResponse:
    return _page(
        f"<p>All keys from logins of <b>{html.escape(owner)}</b> have ended. You are still logged"
        " in at the provider.</p>"
    )


def _page(body: str, status: int = 200) -> HTMLResponse:
    return HTMLResponse(_PAGE.format(body=body), status_code=status, headers=_HEADERS)


def _failure(error: WireError) -> HTMLResponse:
    return _page(f"<p>{html.escape(error.message)}</p>", error.status)
