"""The pages below /login, for browsers. They load nothing and run no scripts.

Logins and logouts start with a POST of this page, so that no other site can make a browser start
one. The cookie belongs to a login under way and gives no rights. A key is shown once: reloading the
page shows an error, as its state has been used. A login for the console shows none, and opens a
session there.
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
from tinkercloud_api.access.browser_sessions import BrowserSessions, is_of_this_site
from tinkercloud_api.catalog.schema.tables import ApiKey, now
from tinkercloud_api.config.readable import moment
from tinkercloud_api.config.sections.login_settings import OidcSettings
from tinkercloud_api.context import Context
from tinkercloud_api.login.openid_login import CALLBACK, Logins, Outcome, Purpose
from tinkercloud_api.web.session_cookie import CONSOLE, set_session
from tinkercloud_protocol.wire.errors import Forbidden, WireError

log = structlog.get_logger(__name__)

_LOGIN = "/login"
_CONSOLE = "/login/console"
_LOGOUT = "/login/logout"
PATHS = (_LOGIN, _CONSOLE, _LOGOUT, CALLBACK)
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
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{{font:1rem system-ui;max-width:44rem;margin:4rem auto;padding:0 1rem}}
code{{display:block;padding:1rem;background:#eee;overflow-wrap:anywhere}}</style></head>
<body><main><h1>Tinkercloud</h1>{body}</main></body></html>"""
_START = """<form method="post" action="login/console"><button>Open the console</button></form>
<form method="post" action=""><p>For programs: <button>Get an API key</button></p></form>
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
        self._app = application(logins, server.auditing, server.browsers, secret, public_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (the ASGI entry point)."""
        assert self._app is not None  # noqa: S101 - requests arrive after startup
        await self._app(scope, receive, send)


def application(
    logins: Logins, auditing: Auditing, browsers: BrowserSessions, secret: str, public_url: str
) -> Starlette:
    """Return the application below /login.

    Args:
        logins: talks to the provider.
        auditing: records logins and logouts.
        browsers: opens sessions in the console.
        secret: signs the cookie; the same in all replicas.
        public_url: address of the server for browsers.
    """
    is_https = urlsplit(public_url).scheme == "https"

    async def show(_request: Request) -> Response:
        return _start_page()

    async def start(request: Request, *, purpose: Purpose) -> Response:
        return await _start(logins, request, purpose, public_url)

    async def finish(request: Request) -> Response:
        try:
            return await answer_to(await logins.finish(request), request)
        except WireError as error:
            return _failure(error)

    async def answer_to(outcome: Outcome, request: Request) -> Response:
        address = request.client.host if request.client else ""
        if outcome.issued is None:
            await auditing.record_logout(outcome.owner, address)
            await logins.end_keys(outcome.owner)
            return _ended(outcome.owner)
        key, row = outcome.issued
        await auditing.record_login(row, outcome.ended, outcome.groups, address)
        if outcome.purpose is Purpose.KEY:
            return _issued(key, row)
        opening = await browsers.with_key(key, address)
        answer = _opened(outcome.owner)
        await auditing.record_console_login(opening.caller, request.scope, answer.status_code)
        session = await browsers.open(opening, now())
        set_session(answer, session.token, is_https=is_https)
        return answer

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
            Route(_LOGIN, partial(start, purpose=Purpose.KEY), methods=["POST"]),
            Route(_CONSOLE, partial(start, purpose=Purpose.CONSOLE), methods=["POST"]),
            Route(_LOGOUT, partial(start, purpose=Purpose.LOGOUT), methods=["POST"]),
            Route(CALLBACK, finish, methods=["GET"]),
        ],
        middleware=[cookie],
    )


def _start_page() -> HTMLResponse:
    page = _page(_START)
    # With `no-referrer`, browsers would name no origin of its forms.
    page.headers["Referrer-Policy"] = "same-origin"
    return page


async def _start(logins: Logins, request: Request, purpose: Purpose, public_url: str) -> Response:
    is_own = is_of_this_site(request.headers, public_url)
    # A request that does not say where it comes from could be of any site. It may start a login,
    # whose key only its user sees, but nothing else.
    if is_own is False or (is_own is None and purpose is not Purpose.KEY):
        return _failure(Forbidden("this starts on the page /login; open it in the browser"))
    try:
        answer = await logins.start(request, purpose)
    except WireError as error:
        return _failure(error)
    answer.status_code = 303
    return answer


def _issued(key: str, row: ApiKey) -> HTMLResponse:
    ends = moment(row.expires_at) or "never"
    return _page(
        f"<p>This is the API key of <b>{html.escape(row.owner)}</b>"
        f" (role {html.escape(row.role)}, until {ends}). It is not shown again.</p>"
        f"<code>{html.escape(key)}</code>"
        "<p>Set it as <b>TINKER_API_KEY</b>.</p>"
    )


def _opened(owner: str) -> HTMLResponse:
    """Return the page that leads to the console.

    If the provider's answer were redirected, browsers would not send a cookie with SameSite=Strict.
    """
    page = _page(
        f"<p>You are logged in as <b>{html.escape(owner)}</b>.</p>"
        f'<p><a href="{CONSOLE}">Open the console</a></p>'
    )
    page.headers["Refresh"] = f"0; url={CONSOLE}"
    return page


def _ended(owner: str) -> HTMLResponse:
    return _page(
        f"<p>All keys from logins of <b>{html.escape(owner)}</b> have ended. You are still logged"
        " in at the provider.</p>"
    )


def _page(body: str, status: int = 200) -> HTMLResponse:
    return HTMLResponse(_PAGE.format(body=body), status_code=status, headers=_HEADERS)


def _failure(error: WireError) -> HTMLResponse:
    return _page(f"<p>{html.escape(error.message)}</p>", error.status)
