"""Resource usage of sessions, for administrators (not SDK calls)."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun, now
from tinkercloud_api.context import Caller, Server
from tinkercloud_protocol.heads.launch import HeldModel
from tinkercloud_protocol.responses.listings import ModelUsage, SessionUsage, SessionUsageList

router = APIRouter(prefix="/api/v1", tags=["sessions"])

LIVE = timedelta(minutes=2)
"""A session is live if a heartbeat, sent every ten seconds, was recorded within this time."""


@router.get("/session_usage")
@names_no_object
async def list_usage(
    server: Server,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
    access_scope: Literal["owned", "accessible"] = "owned",
) -> SessionUsageList:
    """List sessions with their resource usage, newest first."""
    visible = caller.visible(access_scope)
    names = await server.catalog.sessions(visible, Page(offset, limit))
    return SessionUsageList(sessions=await _usage(names, server))


@router.get("/session_usage/{session_id}")
async def show_usage(session_id: str, server: Server, caller: Caller) -> SessionUsage:
    """Return the resource usage of a session."""
    caller.require(await server.catalog.session(session_id), f"session {session_id!r}")
    (usage,) = await _usage([session_id], server)
    return usage


async def _usage(session_ids: Sequence[str], server: Server) -> list[SessionUsage]:
    sessions = await server.catalog.sessions_named(session_ids)
    runs = await server.catalog.runs_of_sessions(session_ids)
    held = await server.shared_heads.models()
    unheld = [run for run in runs if run.deleted_at is None and run.id not in held]
    states = await server.runs.states.of(unheld)
    away = {
        run.id: place
        for run, place in zip(unheld, states, strict=True)
        if place.state in {"suspended", "on disk"}
    }
    # Nothing is known of a run on disk but what it has reported last.
    reported = await server.points.last_points(
        [run_id for run_id, place in away.items() if place.step is None]
    )
    held = held | {
        run_id: HeldModel(
            model_id=run_id,
            is_suspended=True,
            step=reported[run_id].step if run_id in reported else place.step,
        )
        for run_id, place in away.items()
    }
    return [
        _describe(session, [run for run in runs if run.session_id == session.id], held)
        for session in sessions
    ]


def _describe(
    session: Session, runs: Sequence[TrainingRun], held: dict[str, HeldModel]
) -> SessionUsage:
    models = [
        ModelUsage(model_id=run.id, base_model=run.base_model, **_state(run, held.get(run.id)))
        for run in runs
    ]
    known = [model.memory_bytes for model in models if model.memory_bytes is not None]
    return SessionUsage(
        session_id=session.id,
        owner=session.owner,
        project_id=session.project,
        name=session.display_name,
        created_at=session.created_at,
        state=_state_of(session, now()),
        last_heartbeat_at=session.last_heartbeat_at,
        models=models,
        memory_bytes=sum(known) if known else None,
    )


def _state_of(session: Session, moment: datetime) -> Literal["live", "silent", "ended"]:
    if session.finished_at is not None:
        return "ended"
    return "live" if session.last_heartbeat_at >= moment - LIVE else "silent"


def _state(run: TrainingRun, held: HeldModel | None) -> dict[str, object]:
    if run.deleted_at is not None:
        return {"state": "deleted", "memory_bytes": 0}
    if held is None:
        return {"state": "unknown", "memory_bytes": None}
    return {
        "state": "suspended" if held.is_suspended else "in memory",
        "memory_bytes": held.memory_bytes,
        "step": held.step,
        "tokens_per_minute": round(held.tokens_per_minute, 1),
        "queue_state": held.queue_state,
        "unsaved_steps": held.unsaved_steps,
        "autosave_failure": held.autosave_failure,
        "is_durable": held.is_durable,
        "degraded": held.degraded,
    }
