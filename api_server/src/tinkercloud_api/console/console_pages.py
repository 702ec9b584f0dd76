"""The pages below /console, for browsers. They work without scripts and load only their own files.

Each page shows what a call of the API returns, which its foot names, with the rights of the API key
that opened the browser's session.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from fastapi import APIRouter, Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from tinkercloud_api.access.browser_sessions import BrowserSession
from tinkercloud_api.access.effects import READS, changes, declares, names_no_object, shows
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.config.readable import binary_size
from tinkercloud_api.console import page_texts
from tinkercloud_api.console.charts import HEIGHT, WIDTH, Chart, by_steps_taken, chart
from tinkercloud_api.context import Context, Server, get_context
from tinkercloud_api.routes.account import usage_routes
from tinkercloud_api.routes.sessions import problem_routes, run_state_routes
from tinkercloud_protocol.responses.run_states import (
    CurveMetric,
    LoggedPoint,
    RunCurve,
    RunCurvePoint,
)
from tinkercloud_protocol.wire.asgi import Scope
from tinkercloud_protocol.wire.errors import Forbidden, InvalidRequest, Unauthenticated, WireError
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_protocol.wire.json_model import sentences

PREFIX = "/console"
COOKIE = "tinkercloud-console"
_PAGE = 50
"""Runs of a page."""
_MAX_COMPARED = 8
"""Runs whose curves can be compared, as there are so many colours."""
_USAGE_ROWS = 1000
_METRICS = ("loss", "grad_norm", "learning_rate", "kl", "tokens")
_STYLE = "text/css; charset=utf-8"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
    ),
    # With `no-referrer`, browsers would name no origin of our own forms (`_check_site`).
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
_FOLDER = Path(str(files("tinkercloud_api.console")))
_TEMPLATES = Environment(
    loader=FileSystemLoader(_FOLDER / "templates"),
    autoescape=select_autoescape(default=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "shown": page_texts.shown,
    "number": page_texts.number,
    "moment": page_texts.moment,
    "size": binary_size,
    "segment": lambda text: quote(text, safe=":"),
}
_TEMPLATES.globals |= {"width": WIDTH, "height": HEIGHT}


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
                    return _login_page(error.message, HTTPStatus.UNAUTHORIZED)
                return failure(error.message, error.status)
            except WireError as error:
                return failure(error.message, error.status)
            except RequestValidationError as error:
                faults = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]
                return failure(sentences(faults, "request"), HTTPStatus.BAD_REQUEST)

        return handle_page


router = APIRouter(prefix=PREFIX, route_class=PageRoute, include_in_schema=False)


def session_token(scope: Scope) -> str | None:
    """Return what the cookie of a browser's session holds; None if there is none."""
    return Request(scope).cookies.get(COOKIE)


async def _session(request: Request) -> BrowserSession:
    found = request.scope.get("browser")
    if isinstance(found, BrowserSession):
        return replace(found, caller=request.scope["principal"])
    browsers, scope = get_context(request).browsers, request.scope
    return await browsers.find(session_token(scope), _address(scope), now())


def _address(scope: Scope) -> str:
    return str((scope.get("client") or ("",))[0])


def _check_site(request: Request, server: Context) -> None:
    """Check that a form which opens a session is not of another site.

    Browsers say where it comes from in one header or the other.

    Raises:
        Forbidden: it is.
    """
    own = {request.headers.get("host"), urlsplit(server.settings.public_url or "").netloc}
    origin = request.headers.get("origin")
    is_foreign = origin is not None and urlsplit(origin).netloc not in own - {""}
    site = request.headers.get("sec-fetch-site", "none")
    if is_foreign or site not in {"none", "same-origin"}:
        raise Forbidden(
            "this form came from another site: open the page /console/login; behind a proxy that"
            " changes the header Host, set TINKERCLOUD_PUBLIC_URL"
        )


Session = Annotated[BrowserSession, Depends(_session)]


@router.get("")
async def start() -> Response:
    """Lead to the runs."""
    return RedirectResponse(f"{PREFIX}/runs", HTTPStatus.SEE_OTHER)


@router.get("/console.css")
async def style() -> Response:
    """Return the style of all pages."""
    content = (_FOLDER / "static" / "console.css").read_bytes()
    return Response(content, media_type=_STYLE, headers={"Cache-Control": "max-age=300"})


@router.get("/login")
async def show_login(link: str | None = None, run: str | None = None) -> Response:
    """Show the form that opens a session with an API key, or with a link that was printed.

    Args:
        link: the token of the link.
        run: the run whose page follows; None for the list of runs.
    """
    return _page("login.html", link=link, run=run, problem=None)


@router.post("/login")
@declares(READS)
async def log_in(request: Request, server: Server) -> Response:
    """Open a session, and lead to a run or to all runs.

    Raises:
        Forbidden: the form is of another site, which could log a browser in as somebody else.
        Unauthenticated: the key or the link is not valid.
    """
    _check_site(request, server)
    sent, browsers, address = await _form(request), server.browsers, _address(request.scope)
    try:
        if "link" in sent:
            opening = await browsers.with_link(sent["link"], address, now())
        else:
            opening = await browsers.with_key(sent.get("key", "").strip(), address)
    except Unauthenticated as error:
        return _login_page(error.message, HTTPStatus.UNAUTHORIZED)
    await server.auditing.record_console_login(opening.caller, address)
    session = await browsers.open(opening, now())
    run = f"/{quote(sent['run'], safe=':')}" if "run" in sent else ""
    answer = RedirectResponse(f"{PREFIX}/runs{run}", HTTPStatus.SEE_OTHER)
    _set_cookie(answer, request, server, session.token)
    return answer


@router.post("/logout")
@declares(shows("console_logout"))
async def log_out(request: Request, server: Server, session: Session) -> Response:
    """End the session of the browser, or all sessions of its owner."""
    sent = await _form(request)
    session.check_form(sent.get("form_token"))
    await server.browsers.end(session, everywhere=sent.get("everywhere") == "yes")
    answer = RedirectResponse(f"{PREFIX}/login", HTTPStatus.SEE_OTHER)
    answer.delete_cookie(COOKIE, path=PREFIX)
    return answer


@router.get("/runs")
@names_no_object
async def list_runs(
    server: Server,
    session: Session,
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    search: Annotated[str, Query(max_length=256)] = "",
) -> Response:
    """Show the runs that the caller may see, or those that contain a text."""
    offset = (page - 1) * _PAGE
    found = await run_state_routes.list_runs(
        server, session.caller, None, _PAGE, offset, "accessible", search
    )
    return _page(
        "runs.html",
        session=session,
        runs=found.runs,
        total=found.total_count,
        page=page,
        search=search,
        pages=max(1, -(-found.total_count // _PAGE)),
        twin="runs?"
        + urlencode(
            {"access_scope": "accessible", "limit": _PAGE, "offset": offset, "search": search}
        ),
        command="tinkercloud runs list --all",
    )


@router.get("/runs/{run_id}")
async def show_run(
    run_id: str,
    server: Server,
    session: Session,
    follow: Annotated[int | None, Query(ge=2, le=3600)] = None,
) -> Response:
    """Show a run: its curves, its state and its checkpoints."""
    run = await run_state_routes.show_run(run_id, server, session.caller)
    curve = await run_state_routes.show_curve(run_id, server, session.caller)
    row = await server.catalog.run(run_id)

    def draw() -> HTMLResponse:
        return _page(
            "run.html",
            session=session,
            run=run,
            may_change=row is not None and session.caller.may_change(row),
            points=curve.points,
            metrics=[n for n in _METRICS if any(n in each.metrics for each in curve.points)],
            charts=[*_charts({run_id: curve.points}), *_logged_charts(curve)],
            follow=follow,
            twin=f"runs/{quote(run_id, safe=':')}/curve",
            command=f"tinkercloud runs curve {run_id} --watch",
        )

    # Some milliseconds for all that a run can have.
    answer = await asyncio.to_thread(draw)
    if follow is not None:
        answer.headers["Refresh"] = str(follow)
    return answer


@router.post("/runs/{run_id}/stop")
@declares(changes("run_stop"))
async def stop_run(run_id: str, request: Request, server: Server, session: Session) -> Response:
    """Save a run and end it, or suspend it, and show it again."""
    sent = await _form(request)
    session.check_form(sent.get("form_token"))
    wanted = run_state_routes.StopRun(suspend=sent.get("suspend") == "yes")
    await run_state_routes.stop_run(run_id, wanted, server, session.caller)
    return _back_to(run_id)


@router.post("/runs/{run_id}/save")
@declares(changes("checkpoint_write"))
async def save_run(run_id: str, request: Request, server: Server, session: Session) -> Response:
    """Save a checkpoint of a run, and show it again."""
    sent = await _form(request)
    session.check_form(sent.get("form_token"))
    wanted = run_state_routes.SaveRun()
    await run_state_routes.save_run(run_id, wanted, server, session.caller)
    return _back_to(run_id)


@router.get("/compare")
async def compare_runs(
    server: Server, session: Session, run: Annotated[list[str], Query(max_length=_MAX_COMPARED)]
) -> Response:
    """Show the curves of several runs on common axes."""
    curves = {
        run_id: (await run_state_routes.show_curve(run_id, server, session.caller)).points
        for run_id in run
    }
    names = await _names(curves, server)

    def draw() -> HTMLResponse:
        return _page(
            "compare.html",
            session=session,
            runs=names,
            charts=_charts(curves),
            twin=f"runs/{quote(run[0], safe=':')}/curve",
            command=f"tinkercloud runs curve {run[0]}",
        )

    return await asyncio.to_thread(draw)


@router.get("/problems")
@names_no_object
async def show_problems(server: Server, session: Session) -> Response:
    """Show what needs attention, and what to do."""
    found = await problem_routes.list_problems(server, session.caller)
    return _page(
        "problems.html",
        session=session,
        problems=found.problems,
        twin="problems",
        command="tinkercloud problems --watch",
    )


@router.get("/usage")
@names_no_object
async def show_usage(server: Server, session: Session) -> Response:
    """Show what was used, by owner and day, and what checkpoints occupy."""
    found = await usage_routes.show_usage(
        server, session.caller, "day", limit=_USAGE_ROWS, offset=0, access_scope="accessible"
    )
    return _page(
        "usage.html",
        session=session,
        usage=found.usage,
        storage=found.storage,
        twin=f"usage?by=day&access_scope=accessible&limit={_USAGE_ROWS}",
        command="tinkercloud usage --by day --all",
    )


def _charts(curves: Mapping[str, Sequence[RunCurvePoint]]) -> list[Chart]:
    placed = {run: by_steps_taken(points) for run, points in curves.items()}
    return [found for name in _METRICS if (found := chart(name, placed)) is not None]


def _logged_charts(curve: RunCurve) -> list[Chart]:
    """Return the charts of what the client of a run has logged."""
    drawn = {
        name: [(value.step, _as_point(name, value)) for value in values]
        for name, values in curve.logged.items()
    }
    charts = (chart(name, {curve.run_id: places}) for name, places in drawn.items())
    return [found for found in charts if found is not None]


def _as_point(name: str, logged: LoggedPoint) -> RunCurvePoint:
    number = logged.value
    value = CurveMetric.model_construct(mean=number, low=number, high=number, not_finite=0)
    return RunCurvePoint.model_construct(
        step=logged.step, steps=1, time=logged.time, metrics={name: value}
    )


async def _names(runs: Iterable[str], server: Context) -> dict[str, str | None]:
    """Return the names of the sessions of runs that the caller may see."""
    of_session = {run: ModelId.parse(run).session_id for run in runs}
    found = await server.catalog.sessions_named(list(of_session.values()))
    names = {session.id: session.display_name for session in found}
    return {run: names.get(session_id) for run, session_id in of_session.items()}


def _back_to(run_id: str) -> Response:
    return RedirectResponse(f"{PREFIX}/runs/{quote(run_id, safe=':')}", HTTPStatus.SEE_OTHER)


def _set_cookie(answer: Response, request: Request, server: Context, token: str) -> None:
    public_url = server.settings.public_url
    is_https = request.url.scheme == "https" or (public_url or "").startswith("https:")
    answer.set_cookie(COOKIE, token, path=PREFIX, secure=is_https, httponly=True, samesite="strict")


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form; of a field that was sent twice, the last value.

    Raises:
        InvalidRequest: it has too many fields.
    """
    text = (await request.body()).decode("utf-8", errors="replace")
    try:
        found = parse_qs(text, max_num_fields=20)
    except ValueError:
        raise InvalidRequest("the form has more than 20 fields; open the page again") from None
    return {name: values[-1] for name, values in found.items()}


def _page(template: str, status: int = HTTPStatus.OK, /, **values: object) -> HTMLResponse:
    filled = {"session": None, **values}
    content = _TEMPLATES.get_template(template).render(filled)
    return HTMLResponse(content, status_code=status, headers=_HEADERS)


def _login_page(problem: str, status: int) -> HTMLResponse:
    return _page("login.html", status, link=None, run=None, problem=problem)


def failure(message: str, status: int) -> HTMLResponse:
    """Return the page of an error."""
    return _page("failure.html", status, message=message, code=int(status))
