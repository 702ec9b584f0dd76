"""Runs as their owners see them: how each is doing, and saving and stopping them (no SDK calls)."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Query
from pydantic import Field, FiniteFloat, StringConstraints

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import WORKS, changes, declares, names_no_object
from tinkercloud_api.catalog.access.visibility import Visibility
from tinkercloud_api.catalog.runs.run_search import RunSearch
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun, now
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_api.heads.run_remedies import remedy_of
from tinkercloud_api.heads.run_states import Whereabouts
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.routes.account.session_usage import LIVE
from tinkercloud_api.routes.requests.call import wait_for_head
from tinkercloud_api.web.statuses import statuses
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.heads.launch import HeldModel, ModelSpec
from tinkercloud_protocol.heads.reports.thinned_curves import CurvePoint, MetricValues
from tinkercloud_protocol.requests.training_requests import TrainingName
from tinkercloud_protocol.responses.run_states import (
    CurveMetric,
    RunCheckpoint,
    RunCurve,
    RunCurvePoint,
    RunDetails,
    RunInfo,
    RunList,
    RunSaved,
    RunStatus,
    RunStopped,
)
from tinkercloud_protocol.wire.errors import NotFound, StateLost
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_protocol.wire.json_model import Name, Storable, WireModel

router = APIRouter(prefix="/api/v1", tags=["runs"])

_SHOWN_CHECKPOINTS = 10

MetricName = Annotated[str, StringConstraints(min_length=1, max_length=64), Storable]


class SaveRun(WireModel):
    """POST runs/{id}/save."""

    name: TrainingName | None = None
    """Name of the checkpoint, which must be new; absent: one with the number of the step."""


class LogMetrics(WireModel):
    """POST runs/{id}/metrics."""

    step: Annotated[int, Field(ge=0, lt=1 << 53)]
    metrics: Annotated[dict[MetricName, FiniteFloat], Field(min_length=1, max_length=32)]
    """Values by name."""


class StopRun(WireModel):
    """POST runs/{id}/stop."""

    suspend: bool = False
    """Whether the run is only suspended until its next request, rather than saved and deleted."""


@router.get("/runs", responses=statuses("404"))
@names_no_object
async def list_runs(  # noqa: PLR0917 - query parameters
    server: Server,
    caller: Caller,
    owner: Name | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    offset: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
    access_scope: Literal["owned", "accessible"] = "owned",
    search: Annotated[str, Query(max_length=256), Storable] = "",
    status: RunStatus | None = None,
) -> RunList:
    """List runs and how each is doing: the last used first, and those that have ended last.

    `search` selects those whose id, owner, base model, name, project and metadata have all words of
    a text, or words that begin with them.
    `status` selects those in a state, or `open`, all that have not ended. `waiting` also finds runs
    whose next request waits, and `running` and `idle` are of models in memory. States other than
    `ended` are looked for in the 500 runs that were used last. Runs of a session head that does
    not respond are `live`, and those of a store that does not are `unknown`.
    """
    wanted = RunSearch(_visible(caller, owner, access_scope), search)
    found, total = await server.runs.states.search(wanted, status, Page(offset, limit))
    return RunList(runs=await _infos(found, server), total_count=total)


async def last_used_runs(
    server: Context, caller: Principal, most: int, held: Mapping[str, HeldModel]
) -> Sequence[RunInfo]:
    """Return the runs used last that a caller may see, with the models of heads, by id."""
    wanted, page = RunSearch(_visible(caller, None, "accessible")), Page(0, most)
    found, _ = await server.runs.states.search(wanted, None, page, held)
    return await _infos(found, server)


@router.get("/runs/{run_id}")
async def show_run(run_id: str, server: Server, caller: Caller) -> RunDetails:
    """Return how a run is doing, its metadata, and the checkpoints from which it can continue."""
    row = caller.require(await server.catalog.run(run_id), f"training run {run_id!r}")
    (place,) = await server.runs.states.of([row])
    (info,) = await _infos([(row, place)], server)
    found = await server.checkpoints.to_resume_from(run_id, _SHOWN_CHECKPOINTS)
    if info.state == "ended":
        last = (await server.points.last_points([run_id])).get(run_id)
        step, unsaved = _at_the_end(row, found[0] if found else None, last)
        info = info.model_copy(update={"step": step, "unsaved_steps": unsaved})
    (session,) = await server.catalog.sessions_named([row.session_id])
    return RunDetails(
        **info.model_dump(),
        checkpoints=[_checkpoint(each) for each in found],
        user_metadata=row.user_metadata or {},
        session_metadata=session.user_metadata,
        tags=session.tags,
    )


@router.get("/runs/{run_id}/curve")
async def show_curve(run_id: str, server: Server, caller: Caller) -> RunCurve:
    """Return what a run's optimizer steps have reported, in a bounded number of points."""
    (curve,) = await curves_of([run_id], server, caller)
    return curve


async def curves_of(
    run_ids: Sequence[str], server: Context, caller: Principal
) -> Sequence[RunCurve]:
    """Return the curves of runs, in their order.

    Raises:
        NotFound: a run does not exist for the caller.
    """
    rows = {row.id: row for row in await server.catalog.runs_named(run_ids)}
    for run_id in run_ids:
        caller.require(rows.get(run_id), f"training run {run_id!r}")
    curves, logged = await server.points.curves(run_ids), await server.logged.of_runs(run_ids)
    return [
        RunCurve(run_id=run_id, points=_curve_points(curves[run_id].points), logged=logged[run_id])
        for run_id in run_ids
    ]


@router.post("/runs/{run_id}/metrics")
@declares(WORKS)
async def log_metrics(
    run_id: str, request: LogMetrics, server: Server, caller: Caller
) -> dict[str, str]:
    """Record values that the client has computed at a step; those of the step are replaced."""
    await _authorize(run_id, server, caller)
    server.activity.touch(run_id)
    await server.logged.log(run_id, request.step, request.metrics, now())
    return {}


@router.post("/runs/{run_id}/save", responses=statuses("410"))
@declares(changes("checkpoint_write"))
async def save_run(
    run_id: str,
    request: Annotated[SaveRun, Body(default_factory=SaveRun)],
    server: Server,
    caller: Caller,
) -> RunSaved:
    """Save a checkpoint of a run's state after its last optim_step; the body may be absent."""
    await _authorize(run_id, server, caller)
    limit = server.settings.max_checkpoint_bytes_per_owner
    endpoint = await _head_of(run_id, server)
    saved = await server.runs.save(run_id, endpoint, request.name, limit)
    return RunSaved(tinker_path=saved.tinker_path, step=saved.step)


@router.post("/runs/{run_id}/stop", responses=statuses("410"))
@declares(changes("run_stop"))
async def stop_run(
    run_id: str,
    request: Annotated[StopRun, Body(default_factory=StopRun)],
    server: Server,
    caller: Caller,
) -> RunStopped:
    """Save a run and delete its model, or suspend it; the body may be absent."""
    await _authorize(run_id, server, caller)
    if request.suspend:
        if not await server.runs.is_away(run_id):
            await server.runs.suspend(run_id, await _head_of(run_id, server))
        caller.named_objects.add("suspended")
        return RunStopped(state="suspended")
    limit = server.settings.max_checkpoint_bytes_per_owner
    row = caller.require(await server.catalog.run(run_id), f"training run {run_id!r}")
    by = caller.relation_to(row.owner)
    path = await server.runs.end(run_id, await _last_head_of(run_id, server), limit, by)
    # For the audit log, as its path does not say which.
    caller.named_objects.add("ended")
    return RunStopped(state="ended", tinker_path=path)


async def _authorize(run_id: str, server: Context, caller: Principal) -> None:
    await server.locator.known.authorize_run(str(ModelId.parse(run_id)), caller)


async def _head_of(run_id: str, server: Context) -> HeadEndpoint:
    locator = server.locator
    return await wait_for_head(locator.head_of_run(run_id), lambda: locator.run_pending(run_id))


async def _last_head_of(run_id: str, server: Context) -> HeadEndpoint | None:
    """Return the head that can save a run; None if there is no model to save."""
    row = await server.catalog.run(run_id)
    if row is None or row.generation is None:
        return None
    try:
        return await _head_of(run_id, server)
    except StateLost:
        # What is left of it are its checkpoints, the automatic ones included.
        return None


def _visible(caller: Principal, owner: str | None, access_scope: str) -> Visibility:
    """Return which runs a list shows.

    Raises:
        NotFound: it names another owner, and may not see that owner's objects.
    """
    if owner is None:
        return caller.visible(access_scope)
    if not caller.may_see(owner):
        raise NotFound(f"owner: runs of {owner!r} do not exist, or belong to another owner")
    return Visibility(owner) if owner != caller.owner else caller.visible("owned")


async def _infos(runs: Sequence[tuple[TrainingRun, Whereabouts]], server: Context) -> list[RunInfo]:
    found = await server.catalog.sessions_named([row.session_id for row, _ in runs])
    sessions, moment = {session.id: session for session in found}, now()
    points = await server.points.last_points([row.id for row, _ in runs])
    clusters = server.provider.clusters()
    return [
        _info(row, sessions[row.session_id], place, points.get(row.id), moment).model_copy(
            update={"cluster": clusters.get(row.id)}
        )
        for row, place in runs
    ]


def _info(
    row: TrainingRun,
    session: Session,
    place: Whereabouts,
    last: CurvePoint | None,
    moment: datetime,
) -> RunInfo:
    lora, held = ModelSpec.model_validate(row.spec).lora, place.held
    # No head says anything of the first two, and one that repeats requests is behind.
    is_behind = place.state in {"ended", "on disk"} or (held is not None and held.is_repeating)
    return RunInfo(
        run_id=row.id,
        owner=row.owner,
        project_id=session.project,
        name=session.display_name,
        base_model=row.base_model,
        lora_rank=lora.rank if lora is not None else None,
        state=place.state,
        reason=_why_ended(row, session) if place.state == "ended" else place.reason,
        remedy=remedy_of(place, row.id),
        step=last.step if last is not None and is_behind else place.step,
        loss=_metric(last.metrics["loss"]) if last is not None and "loss" in last.metrics else None,
        unsaved_steps=held.unsaved_steps if held is not None else _unsaved(place),
        tokens_per_minute=round(held.tokens_per_minute, 1) if held is not None else 0.0,
        queue_state=place.queue_state,
        queue_reason=place.queue_reason,
        memory_bytes=held.memory_bytes if held is not None else None,
        created_at=row.created_at,
        last_request_at=row.last_request_at,
        last_seen_at=max(row.last_request_at, session.last_heartbeat_at),
        is_connected=session.finished_at is None and session.last_heartbeat_at >= moment - LIVE,
    )


def _at_the_end(
    row: TrainingRun, saved: CheckpointManifest | None, last: CurvePoint | None
) -> tuple[int | None, int | None]:
    """Return the step of an ended run, and the number of its steps that are in no checkpoint.

    Args:
        row: the run.
        saved: its newest training checkpoint.
        last: what it has reported last.
    """
    if last is None:
        return (None, None) if saved is None else (saved.step, 0)
    if saved is None:
        is_new = ModelSpec.model_validate(row.spec).restore_from is None
        return last.step, last.step if is_new else None
    if saved.created_at >= last.at:
        # The reports of the last second before the end may be missing.
        step = max(last.step, saved.step)
        return step, step - saved.step
    # It may have loaded an earlier checkpoint meanwhile.
    return last.step, last.step - saved.step if last.step >= saved.step else None


def _unsaved(place: Whereabouts) -> int | None:
    """Return the unsaved steps of a run that no head holds; here most are not counted."""
    return None if place.state in {"ended", "on disk"} else 0


def _why_ended(row: TrainingRun, session: Session) -> str:
    if row.stopped_by is not None:
        return f"{row.stopped_by} stopped it"
    if session.finished_at is None:
        return "its model was deleted"
    detail = f", {session.finish_detail}" if session.finish_detail else ""
    return f"its session was ended ({session.finish_reason}{detail})"


def _curve_points(points: Sequence[CurvePoint]) -> list[RunCurvePoint]:
    return [
        RunCurvePoint(
            step=point.step,
            steps=point.steps,
            time=point.at,
            metrics={name: _metric(values) for name, values in point.metrics.items()}
            | _rate_of(point, before),
        )
        for before, point in zip((None, *points), points, strict=False)
    ]


def _rate_of(point: CurvePoint, before: CurvePoint | None) -> dict[str, CurveMetric]:
    """Return the tokens per second of a point, by name; none of the first one, or without tokens.

    Args:
        point: the point.
        before: the point before it, at whose time it began.
    """
    tokens = point.metrics.get("tokens")
    seconds = (point.at - before.at).total_seconds() if before is not None else 0.0
    # The clock of a head may have been set back, or another head has another one.
    if tokens is None or seconds <= 0:
        return {}
    rate = tokens.total / seconds
    return {"tokens_per_second": CurveMetric(mean=rate, low=rate, high=rate, not_finite=0)}


def _metric(values: MetricValues) -> CurveMetric:
    is_finite = values.num_values > 0
    return CurveMetric(
        mean=values.mean,
        low=values.low if is_finite else None,
        high=values.high if is_finite else None,
        not_finite=values.not_finite,
    )


def _checkpoint(manifest: CheckpointManifest) -> RunCheckpoint:
    return RunCheckpoint(
        tinker_path=manifest.tinker_path,
        step=manifest.step,
        time=manifest.created_at,
        size_bytes=manifest.size_bytes,
        is_automatic=manifest.path.is_autosave,
    )
