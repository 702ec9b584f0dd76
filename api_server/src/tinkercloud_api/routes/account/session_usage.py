"""Resource usage of sessions, for administrators (not SDK calls)."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.catalog.runs.run_search import RunSearch
from tinkercloud_api.catalog.runs.session_search import Search, Status, matching_ids
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun, now
from tinkercloud_api.context import Caller, Server
from tinkercloud_api.heads.run_remedies import remedy_of
from tinkercloud_api.heads.run_states import Whereabouts
from tinkercloud_protocol.responses.listings import (
    ModelUsage,
    SessionStatus,
    SessionUsage,
    SessionUsageList,
)
from tinkercloud_protocol.wire.json_model import Storable

router = APIRouter(prefix="/api/v1", tags=["sessions"])

LIVE = timedelta(minutes=2)
"""A session is live if a heartbeat, sent every ten seconds, was recorded within this time."""


_LISTED_RUNS = 10
"""Runs that a list has of each session."""
_MAX_WAITING = 500
"""Runs among which those that wait are looked for, the last used first."""
_STATUSES: Mapping[SessionStatus, Sequence[Status]] = {
    "live": [Status(type="active")],
    "silent": [Status(type="silent")],
    "ended": [Status(type="ended")],
    "failed": [Status(type="client_finished", reasons=["errored"]), Status(type="cancelled")],
}
"""The statuses that the catalog knows."""


@router.get("/session_usage")
@names_no_object
async def list_usage(  # noqa: PLR0917 - query parameters
    server: Server,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
    access_scope: Literal["owned", "accessible"] = "owned",
    search: Annotated[str, Query(max_length=256), Storable] = "",
    owner: Annotated[str, Query(max_length=256), Storable] = "",
    project_id: Annotated[str, Query(max_length=256), Storable] = "",
    status: SessionStatus | None = None,
) -> SessionUsageList:
    """List sessions with their resource usage, newest first.

    `search` selects those whose id, owner, name, project or metadata contains a text, and `owner`
    and `project_id` those of exactly one. `waiting` is looked for in the 500 runs of
    these sessions that were used last. `models` are the ten runs of a session that were used last,
    those that have not ended first, and `num_models` counts all.
    """
    visible = caller.visible(access_scope)
    wanted = Search(
        visible=visible,
        text=search,
        owners=[owner] if owner else None,
        project_ids=[project_id] if project_id else None,
        statuses=_STATUSES.get(status) if status is not None else None,
        live_since=now() - LIVE,
    )
    ids = None
    if status == "waiting":
        page = Page(0, _MAX_WAITING)
        runs = RunSearch(visible, session_ids=matching_ids(wanted))
        waiting, _ = await server.runs.states.search(runs, "waiting", page)
        ids = {run.session_id for run, _ in waiting}
        if not ids:
            return SessionUsageList(sessions=[], total_count=0)
    sessions, total = await server.catalog.page_of_sessions(wanted, ids, Page(offset, limit))
    listed = await server.catalog.last_used_runs([each.id for each in sessions], _LISTED_RUNS)
    return SessionUsageList(sessions=await _usage(sessions, listed, server), total_count=total)


@router.get("/session_usage/{session_id}")
async def show_usage(session_id: str, server: Server, caller: Caller) -> SessionUsage:
    """Return the resource usage of a session."""
    found = caller.require(await server.catalog.session(session_id), f"session {session_id!r}")
    (usage,) = await _usage([found], await server.catalog.runs_of_session(session_id), server)
    return usage


async def _usage(
    sessions: Sequence[Session], runs: Sequence[TrainingRun], server: Server
) -> list[SessionUsage]:
    totals = await server.catalog.run_totals([session.id for session in sessions])
    places = await server.runs.states.of(runs)
    # Nothing is known of a run on disk but what it has reported last.
    on_disk = [run.id for run, place in zip(runs, places, strict=True) if place.state == "on disk"]
    reported = await server.points.last_points(on_disk)
    models: dict[str, list[ModelUsage]] = {session.id: [] for session in sessions}
    for run, place in zip(runs, places, strict=True):
        step = reported[run.id].step if run.id in reported else place.step
        models[run.session_id].append(_model(run, place, step))
    return [
        _describe(session, models[session.id], *totals.get(session.id, (0, session.created_at)))
        for session in sessions
    ]


def _describe(
    session: Session, models: list[ModelUsage], num_models: int, last_request_at: datetime
) -> SessionUsage:
    known = [model.memory_bytes for model in models if model.memory_bytes is not None]
    return SessionUsage(
        session_id=session.id,
        owner=session.owner,
        project_id=session.project,
        name=session.display_name,
        created_at=session.created_at,
        state=_state_of(session, now()),
        finish_reason=session.finish_reason,
        finish_detail=session.finish_detail,
        last_heartbeat_at=session.last_heartbeat_at,
        last_seen_at=max(session.last_heartbeat_at, last_request_at),
        models=models,
        num_models=num_models,
        memory_bytes=sum(known) if known else None,
    )


def _state_of(session: Session, moment: datetime) -> Literal["live", "silent", "ended"]:
    if session.finished_at is not None:
        return "ended"
    return "live" if session.last_heartbeat_at >= moment - LIVE else "silent"


def _model(run: TrainingRun, place: Whereabouts, step: int | None) -> ModelUsage:
    model = ModelUsage(
        model_id=run.id,
        base_model=run.base_model,
        state="unknown",
        memory_bytes=None,
        step=step,
        run_state=place.state,
        reason=place.reason,
        queue_state=place.queue_state,
        queue_reason=place.queue_reason,
        remedy=remedy_of(place, run.id),
    )
    if run.deleted_at is not None:
        return model.model_copy(update={"state": "deleted", "memory_bytes": 0})
    if (held := place.held) is None:
        is_away = place.state in {"suspended", "on disk"}
        return model.model_copy(update={"state": "suspended", "memory_bytes": 0} if is_away else {})
    return model.model_copy(
        update={
            "state": "suspended" if held.is_suspended else "in memory",
            "memory_bytes": held.memory_bytes,
            "tokens_per_minute": round(held.tokens_per_minute, 1),
            "unsaved_steps": held.unsaved_steps,
            "autosave_failure": held.autosave_failure,
            "is_durable": held.is_durable,
            "degraded": held.degraded,
        }
    )
