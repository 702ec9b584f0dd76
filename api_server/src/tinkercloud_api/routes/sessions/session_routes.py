"""SDK sessions, one per `ServiceClient`: creation, configuration, heartbeats and end."""

from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, Body, Query
from pydantic import BaseModel, Field

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import READS, WORKS, changes, declares, names_no_object
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Session, now
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_api.providers.session_options import SessionOptions, collect_options
from tinkercloud_api.web.statuses import statuses
from tinkercloud_protocol.responses.listings import (
    ClientConfig,
    CreateSessionAnswer,
    DynamicConfig,
    SessionInfo,
    SessionList,
)
from tinkercloud_protocol.wire.errors import StateLost
from tinkercloud_protocol.wire.ids import new_session_id
from tinkercloud_protocol.wire.json_model import Items, Name, Storable, UserMetadata, WireModel

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/api/v1", tags=["sessions"])


class CreateSession(WireModel):
    """POST create_session."""

    sdk_version: Name = "none"
    tags: Annotated[Items[Annotated[str, Field(max_length=256)]], Field(max_length=64)] = Field(
        default_factory=list
    )
    user_metadata: UserMetadata = Field(default_factory=dict)
    project_id: Name | None = None
    display_name: Annotated[str, Field(max_length=256), Storable] | None = None


class Heartbeat(WireModel):
    """POST session_heartbeat."""

    session_id: Name


class FinishReason(WireModel):
    """Why a client ended its session."""

    type: Literal["success", "errored", "interrupted"]


class Finish(WireModel):
    """POST sessions/{id}/finish."""

    reason: FinishReason
    detail: Annotated[str, Field(max_length=4096), Storable] | None = None


class AssignProject(WireModel):
    """PUT sessions/{id}/project."""

    project_id: Name


class Telemetry(BaseModel):
    """POST telemetry: events that the SDK reports. Only crashes are logged."""

    session_id: str = ""
    events: Annotated[Items[dict[str, Any]], Field(max_length=1000)] = []
    """Events of one report; the SDK sends at most 100."""


@router.post("/client/config")
@declares(READS)
@names_no_object
async def client_config(server: Server, _caller: Caller) -> ClientConfig:
    """Return the flags that the SDK requests at startup."""
    settings = server.settings
    return ClientConfig(
        proto_compress_fwdbwd=settings.compress_uploads,
        pjwt_auth_enabled=settings.access_tokens,
    )


@router.post("/client/dynamic_config")
@declares(READS)
@names_no_object
async def dynamic_config(_caller: Caller) -> DynamicConfig:
    """Return the flags that the SDK requests periodically."""
    return DynamicConfig()


@router.post("/create_session")
@declares(changes("session_create"))
async def create_session(
    request: Annotated[CreateSession, Body(default_factory=CreateSession)],
    server: Server,
    caller: Caller,
) -> CreateSessionAnswer:
    """Create a session, in a project if the request names one. The body may be absent."""
    if request.project_id is not None:
        await server.projects.require_member(request.project_id, caller)
    SessionOptions.read(collect_options(request.tags, request.user_metadata))
    session = Session(
        id=new_session_id(),
        owner=caller.owner,
        sdk_version=request.sdk_version,
        display_name=request.display_name,
        project_id=request.project_id,
        key_id=caller.key_id,
        tags=request.tags,
        user_metadata=request.user_metadata,
    )
    await server.catalog.add_session(session)
    caller.named_objects.add(session.id)
    log.info("session created", session_id=session.id, owner=caller.owner)
    return CreateSessionAnswer(session_id=session.id)


@router.post("/session_heartbeat", responses=statuses("410"))
@declares(WORKS)
async def heartbeat(request: Heartbeat, server: Server, caller: Caller) -> dict[str, str]:
    """Record that a session's client is alive; return 410 if the session has ended."""
    session = caller.require(
        await server.catalog.session(request.session_id), f"session {request.session_id!r}"
    )
    if session.finished_at is not None:
        raise StateLost(f"session {request.session_id!r} has ended; create a new ServiceClient")
    server.activity.record_heartbeat(request.session_id)
    return {}


@router.post("/sessions/{session_id}/finish")
@declares(changes("session_finish"))
async def finish(
    session_id: str, request: Finish, server: Server, caller: Caller
) -> dict[str, str]:
    """End a session and free its resources; the first reason is kept.

    The runs of a client that did not end by itself are saved first.
    """
    session = await _session_to_change(session_id, server, caller)
    if request.reason.type != "success" and session.finished_at is None:
        runs = await server.catalog.runs_of_session(session_id)
        limit = server.settings.max_checkpoint_bytes_per_owner
        await server.runs.save_interrupted(runs, now(), limit)
    await server.training_runs.finish_session(session_id, request.reason.type, request.detail)
    await server.custom_losses.delete(session_id)
    return {}


@router.put("/sessions/{session_id}/project")
@declares(changes("project_session_assign"))
async def assign_project(
    session_id: str, request: AssignProject, server: Server, caller: Caller
) -> dict[str, str]:
    """Move a session, with its runs and checkpoints, to a project; it never leaves all projects."""
    session = await _session_to_change(session_id, server, caller)
    await server.projects.move(session, request.project_id, caller)
    return {}


@router.delete("/sessions/{session_id}")
@declares(changes("session_delete"))
async def delete_session(session_id: str, server: Server, caller: Caller) -> dict[str, str]:
    """End a session administratively (not an SDK call), but keep its checkpoints."""
    session = await _session_to_change(session_id, server, caller)
    detail = f"deleted by {caller.relation_to(session.owner)}"
    await server.training_runs.finish_session(session_id, "interrupted", detail)
    await server.custom_losses.delete(session_id)
    return {}


async def _session_to_change(session_id: str, server: Context, caller: Principal) -> Session:
    session = caller.require(await server.catalog.session(session_id), f"session {session_id!r}")
    caller.named_objects.add(session_id)
    return session


@router.get("/sessions")
@names_no_object
async def list_sessions(
    server: Server,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    offset: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
    access_scope: Literal["owned", "accessible"] = "owned",
) -> SessionList:
    """List sessions, newest first."""
    visible, page = caller.visible(access_scope), Page(offset, limit)
    return SessionList(sessions=list(await server.catalog.sessions(visible, page)))


@router.get("/sessions/{session_id}")
async def show_session(session_id: str, server: Server, caller: Caller) -> SessionInfo:
    """List the training runs and sampling sessions of a session."""
    session = caller.require(await server.catalog.session(session_id), f"session {session_id!r}")
    runs = await server.catalog.runs_of_session(session_id)
    samplers = await server.catalog.samplers_of_session(session_id)
    return SessionInfo(
        training_run_ids=[run.id for run in runs],
        sampler_ids=[sampler.id for sampler in samplers],
        user_metadata=session.user_metadata,
        display_name=session.display_name,
    )


@router.post("/telemetry")
@declares(READS)
@names_no_object
async def telemetry(request: Telemetry, _caller: Caller) -> dict[str, str]:
    """Accept the SDK's reports and log the crashes of clients."""
    for event in request.events:
        if event.get("event") == "UNHANDLED_EXCEPTION":
            log.info(
                "client reported an unhandled exception",
                session_id=request.session_id[:64],
                error_type=str(event.get("error_type"))[:200],
                error_message=str(event.get("error_message"))[:500],
            )
    return {"status": "accepted"}
