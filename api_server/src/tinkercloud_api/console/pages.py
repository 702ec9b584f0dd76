"""Shared by all pages of the console: sessions, forms, layout and errors."""

import asyncio
import shlex
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import APIRouter, Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from pydantic import BaseModel, ValidationError

from tinkercloud_api.access.browser_sessions import BrowserSession, BrowserSessions
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.config.readable import age_of, binary_size, moment
from tinkercloud_api.console import page_texts
from tinkercloud_api.console.charts import HEIGHT, WIDTH
from tinkercloud_api.context import get_context
from tinkercloud_api.web.session_cookie import CONSOLE, forget_session, session_token
from tinkercloud_protocol.wire.asgi import Scope
from tinkercloud_protocol.wire.errors import InvalidRequest, Unauthenticated, WireError
from tinkercloud_protocol.wire.json_model import describe, sentences

FOLDER = Path(str(files("tinkercloud_api.console")))
_WITHOUT_SESSION = (f"{CONSOLE}/login", f"{CONSOLE}/static/")
"""What needs no session, and a browser whose session has ended must reach: a page, and files."""
_AGAIN_SECONDS = 5
"""Time after which a browser loads a page again that can't be shown now."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
    ),
    # With `no-referrer`, browsers would name no origin of our own forms (`is_of_this_site`).
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
_TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER / "templates"),
    autoescape=select_autoescape(default=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def segment(text: str) -> str:
    """Return a text as one segment of a path."""
    return quote(text, safe=":")


_TEMPLATES.filters |= {
    "shown": page_texts.shown,
    "number": page_texts.number,
    "mean": page_texts.mean,
    "moment": moment,
    "size": binary_size,
    "age": age_of,
    "segment": segment,
    "quoted": shlex.quote,
    "output": page_texts.output,
}
_TEMPLATES.globals |= {"width": WIDTH, "height": HEIGHT}

FormT = TypeVar("FormT", bound=BaseModel)


class PageRoute(APIRoute):
    """A route whose errors are pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        handle = super().get_route_handler()

        async def handle_page(request: Request) -> Response:
            try:
                return await handle(request)
            except Unauthenticated as error:
                if request.method == "GET":
                    answer = await login_page(request, problem=error.message)
                else:
                    answer = await failure(error.message, error.status, request.method)
                # Each request with the cookie of an ended session is a failed attempt.
                forget_session(answer)
                return answer
            except WireError as error:
                return await failure(error.message, error.status, request.method)
            except RequestValidationError as error:
                faults = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]
                message = sentences(faults, "request")
                return await failure(message, HTTPStatus.BAD_REQUEST, request.method)

        return handle_page


def page_router() -> APIRouter:
    """Return the router of a module of pages."""
    return APIRouter(prefix=CONSOLE, route_class=PageRoute, include_in_schema=False)


def address_of(scope: Scope) -> str:
    """Return the address that a request came from; empty if it is unknown."""
    return str((scope.get("client") or ("",))[0])


async def look_up_session(scope: Scope, browsers: BrowserSessions) -> BrowserSession | None:
    """Look up the session of a request, once, and keep in its scope what was found.

    Returns:
        The session; None if the browser has none, or the page needs none.

    Raises:
        Overloaded: too many cookies from the same address had no session.
    """
    if scope["path"].startswith(_WITHOUT_SESSION):
        return None
    try:
        found = await browsers.find(session_token(scope), address_of(scope), now())
    except Unauthenticated as error:
        # Pages say why, and ask for a key.
        scope["browser"] = error
        return None
    scope["browser"] = found
    return found


def _session(request: Request) -> BrowserSession:
    found = request.scope["browser"]
    if isinstance(found, Unauthenticated):
        raise found
    assert isinstance(found, BrowserSession)  # noqa: S101 - as `look_up_session` keeps it
    return replace(found, caller=request.scope["principal"])


Session = Annotated[BrowserSession, Depends(_session)]
"""The session of the browser.

Raises:
    Unauthenticated: it has none.
"""


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form that are not empty; of a field sent twice, the last value.

    Raises:
        InvalidRequest: it has too many fields.
    """
    text = (await request.body()).decode("utf-8", errors="replace")
    try:
        found = parse_qs(text, max_num_fields=20)
    except ValueError:
        raise InvalidRequest("the form has more than 20 fields; open the page again") from None
    return {name: values[-1] for name, values in found.items()}


async def _sent(request: Request, session: Session) -> dict[str, str]:
    sent = await form_of(request)
    session.check_form(sent.get("form_token"))
    return sent


OWN_FORM = Depends(_sent)
"""Checks that what was sent is a form of the session.

Raises:
    Forbidden: it is not.
    InvalidRequest: it has too many fields.
"""
Sent = Annotated[dict[str, str], OWN_FORM]
"""The fields of a form of the session; raises as `OWN_FORM` does."""


def read(form: type[FormT], sent: dict[str, str]) -> FormT:
    """Return what the fields of a form mean.

    Raises:
        InvalidRequest: a field has another value than the form allows.
    """
    try:
        return form.model_validate(sent)
    except ValidationError as error:
        raise InvalidRequest(describe(error, "form")) from None


def check_confirmed(sent: dict[str, str]) -> None:
    """Check that the box of a form which deletes something was ticked.

    Raises:
        InvalidRequest: it was not.
    """
    if sent.get("confirmed") != "yes":
        raise InvalidRequest("confirmed: nothing was changed; tick the box of the form first")


async def show(template: str, status: int = HTTPStatus.OK, /, **values: object) -> HTMLResponse:
    """Return a page.

    It is rendered in a thread, because tables of a thousand rows take some 20 ms.

    Args:
        template: its template.
        status: the status of the response.
        values: what the template shows; with `session`, the links to all pages; with `twin` and
            `command`, the call of the API and the command that return the same.
    """
    return await asyncio.to_thread(_rendered, template, status, {"session": None, **values})


def _rendered(template: str, status: int, values: Mapping[str, object]) -> HTMLResponse:
    content = _TEMPLATES.get_template(template).render(values)
    return HTMLResponse(content, status_code=status, headers=_HEADERS)


Follow = Annotated[int | None, Query(ge=2, le=3600)]
"""Seconds after which a browser loads a page again; None for never."""


def follow_up(answer: HTMLResponse, follow: int | None) -> HTMLResponse:
    """Return a page that a browser loads again after some seconds (`Follow`)."""
    if follow is not None:
        answer.headers["Refresh"] = str(follow)
    return answer


async def login_page(
    request: Request, *, problem: str | None = None, link: str | None = None, run: str | None = None
) -> HTMLResponse:
    """Return the page that opens a session.

    Args:
        request: the request of the browser.
        problem: why the browser has no session; None if it asked for this page.
        link: the token of a link that was printed.
        run: the run whose page follows; None for the list of runs.
    """
    status = HTTPStatus.OK if problem is None else HTTPStatus.UNAUTHORIZED
    oidc = get_context(request).settings.oidc
    provider = urlsplit(oidc.issuer).netloc if oidc is not None else None
    return await show("login.html", status, problem=problem, link=link, run=run, provider=provider)


async def failure(message: str, status: int, method: str) -> HTMLResponse:
    """Return the page of an error.

    Browsers load a page that can't be shown now again by themselves, without scripts too. What a
    form has sent is not sent again.

    Args:
        message: what is wrong, and what to do.
        status: the status of the response.
        method: that of the request.
    """
    again = _AGAIN_SECONDS if status == HTTPStatus.SERVICE_UNAVAILABLE and method == "GET" else None
    page = await show("failure.html", status, message=message, code=int(status), again=again)
    return follow_up(page, again)


def lead_to(path: str) -> Response:
    """Return a redirect to a page, after a form.

    Args:
        path: the path of the page below the console's.
    """
    return RedirectResponse(f"{CONSOLE}/{path}", HTTPStatus.SEE_OTHER)
