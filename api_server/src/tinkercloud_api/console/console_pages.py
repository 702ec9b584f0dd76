"""The pages below /console, for browsers. They work without scripts too, and load only own files.

Each page shows what a call of the API returns, which its foot names, with the rights of the API key
that opened the browser's session.
"""

import asyncio
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from shlex import quote
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import Depends, Query, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.staticfiles import StaticFiles

from tinkercloud_api.access.browser_sessions import is_of_this_site
from tinkercloud_api.access.effects import READS, changes, declares, names_no_object, shows
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.console import checkpoint_pages
from tinkercloud_api.console.curve_range import compared, shown_curve
from tinkercloud_api.console.pages import (
    FOLDER,
    OWN_FORM,
    Follow,
    Sent,
    Session,
    address_of,
    check_confirmed,
    follow_up,
    form_of,
    lead_to,
    login_page,
    page_router,
    segment,
    show,
)
from tinkercloud_api.context import Context, Server
from tinkercloud_api.heads.run_states import most_searched
from tinkercloud_api.routes.sessions import (
    problem_routes,
    run_state_routes,
    sample_text_routes,
    traces,
)
from tinkercloud_api.web.session_cookie import CONSOLE, forget_session, set_session
from tinkercloud_protocol.responses.run_states import RunStatus, RunTimeline
from tinkercloud_protocol.wire.errors import Forbidden, InvalidRequest, NotFound, Unauthenticated
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_protocol.wire.json_model import Storable

_PAGE = 50
"""Runs of a page."""
_STATUSES: Mapping[RunStatus | Literal[""], str] = {
    "": "all",
    "open": "not ended",
    "live": "live: in memory, or on a head that is busy",
    "running": "running: a request is computed",
    "idle": "idle: in memory, without a request",
    "waiting": "waiting: the run or its next request waits",
    "suspended": "suspended: in the checkpoint store",
    "on disk": "on disk: in its journal",
    "dedicated": "dedicated: on a head of its own",
    "ending": "ending: its session ends and saves a last checkpoint",
    "lost": "lost: only checkpoints are left",
    "ended": "ended",
    "unknown": "unknown: its store or disk does not respond",
}
"""What each status of a search means."""
_MAX_COMPARED = 8
"""Runs whose curves can be compared, as there are so many colours."""
_STATIC = StaticFiles(directory=FOLDER / "static")
_SERVED = {
    path.relative_to(FOLDER / "static").as_posix()
    for path in (FOLDER / "static").rglob("*")
    if path.is_file()
}
"""The files that all browsers may read."""

router = page_router()


@router.get("")
async def start() -> Response:
    """Lead to the runs."""
    return lead_to("runs")


@router.get("/static/{name:path}")
async def show_static(name: str, request: Request) -> Response:
    """Return a style, a script or a licence, unless the browser has it already.

    Raises:
        NotFound: the console has no file with this name.
    """
    if name not in _SERVED:
        raise NotFound(f"the console has no file {name!r}; open {CONSOLE} for its pages")
    answer = await _STATIC.get_response(name, request.scope)
    answer.headers["Cache-Control"] = "max-age=300"
    return answer


@router.get("/login")
async def show_login(request: Request, link: str | None = None, run: str | None = None) -> Response:
    """Show the ways to open a session: with an API key, a link that was printed, or OpenID.

    Args:
        request: the request of the browser.
        link: the token of the link.
        run: the run whose page follows; None for the list of runs.
    """
    return await login_page(request, link=link, run=run)


@router.post("/login")
@declares(READS)
async def log_in(request: Request, server: Server) -> Response:
    """Open a session, and lead to a run or to all runs.

    Raises:
        Forbidden: the form is of another site, which could log a browser in as somebody else.
        Unauthenticated: the key or the link is not valid.
    """
    if is_of_this_site(request.headers, server.settings.public_url) is False:
        raise Forbidden(
            "this form came from another site: open the page /console/login; behind a proxy that"
            " changes the header Host, set TINKERCLOUD_PUBLIC_URL"
        )
    sent, browsers, address = await form_of(request), server.browsers, address_of(request.scope)
    try:
        if "link" in sent:
            opening = await browsers.with_link(sent["link"], address, now())
        else:
            opening = await browsers.with_key(sent.get("key", "").strip(), address)
    except Unauthenticated as error:
        return await login_page(request, problem=error.message)
    answer = lead_to(f"runs/{segment(sent['run'])}" if "run" in sent else "runs")
    await server.auditing.record_console_login(opening.caller, request.scope, answer.status_code)
    session = await browsers.open(opening, now())
    public_url = server.settings.public_url or ""
    is_https = request.url.scheme == "https" or public_url.startswith("https:")
    set_session(answer, session.token, is_https=is_https)
    return answer


@router.post("/logout")
@declares(shows("console_logout"))
async def log_out(sent: Sent, server: Server, session: Session) -> Response:
    """End the session of the browser, or all sessions of its owner."""
    await server.browsers.end(session, everywhere=sent.get("everywhere") == "yes")
    answer = lead_to("login")
    forget_session(answer)
    return answer


@router.get("/runs")
@names_no_object
async def list_runs(
    server: Server,
    session: Session,
    page: Annotated[int, Query(ge=1, le=1_000_000)] = 1,
    search: Annotated[str, Query(max_length=256), Storable] = "",
    status: Literal[RunStatus, ""] = "",
) -> Response:
    """Show the runs that the caller may see, or those that contain a text or have a status."""
    offset = (page - 1) * _PAGE
    found = await run_state_routes.list_runs(
        server, session.caller, None, _PAGE, offset, "accessible", search, status or None
    )
    wanted = {"search": search, "status": status}
    chosen = {name: value for name, value in wanted.items() if value}
    return await show(
        "runs.html",
        session=session,
        runs=found.runs,
        total=found.total_count,
        page=page,
        **wanted,
        statuses=_STATUSES,
        most_searched=most_searched(status) if status else 0,
        chosen=urlencode(chosen),
        pages=max(1, -(-found.total_count // _PAGE)),
        twin="runs?"
        + urlencode({"access_scope": "accessible", "limit": _PAGE, "offset": offset, **chosen}),
        command=" ".join(
            ("tinkercloud runs list --all", *(f"--{each} {quote(chosen[each])}" for each in chosen))
        ),
    )


def _steps(
    first: Annotated[int | None, Query(alias="from", ge=0, lt=2**53)] = None,
    last: Annotated[int | None, Query(alias="to", ge=0, lt=2**53)] = None,
) -> tuple[int | None, int | None]:
    if first is not None and last is not None and last < first:
        raise InvalidRequest(f"to: got {last}, must be at least {first}, the value of 'from'")
    return first, last


Steps = Annotated[tuple[int | None, int | None], Depends(_steps)]
"""The first and the last step that a page is to show; None for those of the run.

Raises:
    InvalidRequest: the last one is before the first one.
"""


@router.get("/runs/{run_id}")
async def show_run(
    run_id: str, server: Server, session: Session, steps: Steps, follow: Follow = None
) -> Response:
    """Show a run: its curves, all or some of their steps, its state and its checkpoints."""
    run = await run_state_routes.show_run(run_id, server, session.caller)
    curve = await run_state_routes.show_curve(run_id, server, session.caller)
    row = await server.catalog.run(run_id)
    checkpoints = await checkpoint_pages.listed(run, server)
    timeline = await traces.show_timeline(run_id, server, session.caller)
    samples = await sample_text_routes.show_samples(run_id, server, session.caller)

    # Some milliseconds for all that a run can have.
    shown = await asyncio.to_thread(shown_curve, curve, *steps)
    answer = await show(
        "run.html",
        session=session,
        run=run,
        may_change=row is not None and session.caller.may_change(row),
        zoom=shown.zoom,
        points=shown.points,
        metrics=shown.metrics,
        logged=shown.logged,
        logged_names=sorted(curve.logged),
        charts=shown.charts,
        checkpoints=checkpoints,
        timeline=timeline,
        longest=_longest(timeline),
        samples=samples,
        most_samples=sample_text_routes.MAX_SAMPLES,
        follow=follow,
        twin=f"runs/{segment(run_id)}/curve",
        command=f"tinkercloud runs curve {run_id} --watch",
    )
    return follow_up(answer, follow)


@router.get("/runs/{run_id}/trace")
async def download_trace(
    run_id: str, request: Request, server: Server, session: Session
) -> Response:
    """Redirect to the signed URL of the trace of a run's session."""
    row = session.caller.require(await server.catalog.run(run_id), f"training run {run_id!r}")
    answer = await traces.export_trace(row.session_id, request, server, session.caller)
    return RedirectResponse(answer.url, HTTPStatus.SEE_OTHER, {"Cache-Control": "no-store"})


@router.post("/runs/{run_id}/stop")
@declares(changes("run_stop"))
async def stop_run(run_id: str, sent: Sent, server: Server, session: Session) -> Response:
    """Save a run and end it, or suspend it, and show it again."""
    wanted = run_state_routes.StopRun(suspend=sent.get("suspend") == "yes")
    await run_state_routes.stop_run(run_id, wanted, server, session.caller)
    return lead_to(f"runs/{segment(run_id)}")


@router.post("/runs/{run_id}/save", dependencies=[OWN_FORM])
@declares(changes("checkpoint_write"))
async def save_run(run_id: str, server: Server, session: Session) -> Response:
    """Save a checkpoint of a run, and show it again."""
    wanted = run_state_routes.SaveRun()
    await run_state_routes.save_run(run_id, wanted, server, session.caller)
    return lead_to(f"runs/{segment(run_id)}")


@router.post("/runs/{run_id}/samples")
@declares(changes("run_samples_keep"))
async def keep_samples(run_id: str, sent: Sent, server: Server, session: Session) -> Response:
    """Keep the text of some samples of a run, or of no further ones, and show it again."""
    wanted = sample_text_routes.KeepSamples(keep=sent.get("keep") == "yes")
    await sample_text_routes.keep_samples(run_id, wanted, server, session.caller)
    return lead_to(f"runs/{segment(run_id)}#samples")


@router.post("/runs/{run_id}/samples/delete")
@declares(changes("run_samples_delete"))
async def delete_samples(run_id: str, sent: Sent, server: Server, session: Session) -> Response:
    """Delete the samples of a run that were kept, and keep no further ones."""
    check_confirmed(sent)
    await sample_text_routes.delete_samples(run_id, server, session.caller)
    return lead_to(f"runs/{segment(run_id)}#samples")


@router.get("/compare")
async def compare_runs(
    server: Server,
    session: Session,
    run: Annotated[list[str], Query(max_length=_MAX_COMPARED, default_factory=list)],
) -> Response:
    """Show the curves of several runs on common axes, or without runs how to choose them."""
    run = list(dict.fromkeys(run))
    metrics = await asyncio.to_thread(
        compared, await run_state_routes.curves_of(run, server, session.caller)
    )
    return await show(
        "compare.html",
        session=session,
        runs=await _names(run, server),
        metrics=metrics,
        charts=[metric.chart for metric in metrics if metric.chart is not None],
        most=_MAX_COMPARED,
        twins=[f"runs/{segment(each)}/curve" for each in run] or ["runs"],
        command=" ".join(("tinkercloud runs compare", *run)) if run else "tinkercloud runs list",
    )


@router.get("/problems")
@names_no_object
async def show_problems(server: Server, session: Session) -> Response:
    """Show what needs attention, and what to do."""
    found = await problem_routes.list_problems(server, session.caller)
    return await show(
        "problems.html",
        session=session,
        problems=found.problems,
        twin="problems",
        command="tinkercloud problems --watch",
    )


def _longest(timeline: RunTimeline) -> float:
    """Return the seconds of the longest request of a timeline: of the whole width of a bar."""
    return max((each.wait_seconds + each.run_seconds for each in timeline.requests), default=0) or 1


async def _names(runs: Iterable[str], server: Context) -> dict[str, str | None]:
    """Return the names of the sessions of runs that the caller may see."""
    of_session = {run: ModelId.parse(run).session_id for run in runs}
    found = await server.catalog.sessions_named(list(of_session.values()))
    names = {session.id: session.display_name for session in found}
    return {run: names.get(session_id) for run, session_id in of_session.items()}
