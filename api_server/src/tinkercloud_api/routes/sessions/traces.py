"""Traces of sessions and timelines of runs: how long requests waited and when they ran.

`trace_export` returns a signed URL at once; the trace is made when it is downloaded, from what the
running heads remember. It is in the Trace Event Format, which https://ui.perfetto.dev opens.
"""

import asyncio
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request, Response

from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_api.heads.known_runs import placement_of
from tinkercloud_api.routes.checkpoints.download_routes import base_url
from tinkercloud_api.routes.sessions.trace_counters import MICROSECONDS, counter_events
from tinkercloud_api.web.statuses import statuses
from tinkercloud_protocol.heads.request_timeline import Span
from tinkercloud_protocol.responses.account_listings import TraceExport
from tinkercloud_protocol.responses.run_states import RunRequest, RunTimeline
from tinkercloud_protocol.wire.errors import NotFound, Unavailable
from tinkercloud_protocol.wire.future_responses import JSON
from tinkercloud_protocol.wire.paths import CheckpointPath

_AWAY = (
    "the session head of this run is away, and only a running head knows its requests; those after"
    " the run continues are shown again"
)

router = APIRouter()


@router.get("/api/v1/sessions/{session_id}/trace_export", tags=["sessions"])
async def export_trace(
    session_id: str, request: Request, server: Server, caller: Caller
) -> TraceExport:
    """Return a URL, valid for an hour, by which the trace of a session can be downloaded."""
    caller.require(await server.catalog.session(session_id), f"session {session_id!r}")
    token = server.authenticator.trace_token(session_id)
    return TraceExport(url=f"{base_url(request, server)}/traces/{token}")


@router.get("/traces/{token}", tags=["sessions"], responses=statuses("404", "503"))
async def download_trace(token: str, server: Server) -> Response:
    """Download a trace by its signed URL."""
    session_id = server.authenticator.session_of_trace(token)
    if session_id is None or await server.catalog.session(session_id) is None:
        raise NotFound("the URL of the trace is wrong or has expired; call trace_export again")
    runs = await server.catalog.runs_of_session(session_id)
    heads = [server.provider.find(placement_of(run)) for run in runs]
    own = [head for head in heads if head is not None]
    spans = await server.shared_heads.spans(session_id, own)
    return Response(
        await asyncio.to_thread(trace_of, spans),
        media_type=JSON,
        headers={
            "Cache-Control": "private, no-store",
            "Content-Disposition": f'attachment; filename="{session_id}.trace.json"',
            "X-Content-Type-Options": "nosniff",
        },
    )


@router.get("/api/v1/runs/{run_id}/timeline", tags=["runs"])
async def show_timeline(
    run_id: str, server: Server, caller: Caller, limit: Annotated[int, Query(ge=1, le=1000)] = 20
) -> RunTimeline:
    """Return how long the last requests of a run, and of samplers of its weights, waited and ran.

    Only a running head knows them: without one, `reason` says that it is away.
    """
    row = caller.require(await server.catalog.run(run_id), f"training run {run_id!r}")
    heads = server.provider.heads_of(row.owner)
    if row.generation not in {head.generation for head in heads}:
        return RunTimeline(run_id=run_id, requests=[], reason=_AWAY)
    try:
        spans = await server.shared_heads.spans(row.session_id, heads)
    except Unavailable as error:
        return RunTimeline(run_id=run_id, requests=[], reason=error.message)
    targets = {span.target for span in spans}
    own = {each for each in targets if run_id in {each, await _sampled_run(each, server)}}
    of_run = [span for span in spans if span.target in own]
    latest = sorted(of_run, key=lambda span: span.finished, reverse=True)[:limit]
    return RunTimeline(run_id=run_id, requests=[_request(span) for span in latest])


async def _sampled_run(target: str, server: Context) -> str | None:
    """Return the run whose weights a sampling session has; None of a base model, and of a run."""
    sampler = await server.locator.known.sampler(target)
    if sampler is None or sampler.spec.model_path is None:
        return sampler.run_id if sampler is not None else None
    return CheckpointPath.parse(sampler.spec.model_path).run_id


def _request(span: Span) -> RunRequest:
    # A head's clock may be set back.
    started = max(span.accepted, span.started)
    return RunRequest(
        target=span.target,
        name=span.name,
        request_id=span.request,
        accepted_at=datetime.fromtimestamp(span.accepted, UTC),
        wait_seconds=started - span.accepted,
        run_seconds=max(started, span.finished) - started,
        paused_seconds=_paused(span),
        tokens=span.tokens,
    )


def _paused(span: Span) -> float:
    """Return how many seconds of its wait a request was paused because of its owner."""
    return min(span.paused, max(span.accepted, span.started) - span.accepted)


def trace_of(spans: Iterable[Span]) -> bytes:
    """Return spans in the Trace Event Format (JSON).

    Each model or sampling session is a process, and each of its requests two asynchronous events:
    its wait in the queue, and then its execution. Where its owner's limits held it back, the wait
    has an instant event `rate limit`. The process `all requests` has the counters.
    """
    in_order = sorted(spans, key=lambda span: (span.target, span.accepted))
    processes = {"all requests": None, **{span.target: None for span in in_order}}
    tracks = {name: number for number, name in enumerate(processes, 1)}
    names = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": target}}
        for target, number in tracks.items()
    ]
    events = [
        event
        for number, span in enumerate(in_order)
        for event in _events(span, number, tracks[span.target])
    ]
    events += counter_events(in_order, tracks["all requests"])
    return orjson.dumps({"displayTimeUnit": "ms", "traceEvents": [*names, *events]})


def _events(span: Span, number: int, track: int) -> Iterator[dict[str, object]]:
    # Perfetto draws events with a global `id` apart from their process.
    own = {"id2": {"local": hex(number)}, "pid": track, "tid": 0}
    named = {"request_id": span.request} if span.request is not None else {}
    for name, start, end in (
        ("queue", span.accepted, span.started),
        (span.name, span.started, span.finished),
    ):
        common = {"cat": name, "name": name, **own, **({"args": named} if named else {})}
        for phase, moment in (("b", start), ("e", max(start, end))):
            yield {**common, "ph": phase, "ts": round(moment * MICROSECONDS)}
        if name == "queue" and (paused := _paused(span)):
            args = {**named, "paused_seconds": paused}
            ts = round((max(start, end) - paused) * MICROSECONDS)
            yield {**common, "name": "rate limit", "ph": "n", "ts": ts, "args": args}
