"""What needs attention: failing stores, disks, models, sessions, runs and programs; full quotas."""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta

from fastapi import APIRouter

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.runs.run_search import RunSearch
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import TrainingRun, now
from tinkercloud_api.config.readable import binary_size
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_api.heads.run_remedies import remedy_of_state, remedy_of_wait
from tinkercloud_api.heads.run_states import HEAD_IS_SILENT, Whereabouts
from tinkercloud_api.runs.server_disks import full_disks
from tinkercloud_protocol.heads.owner_limits import TOKENS_PER_MINUTE
from tinkercloud_protocol.programs.program_messages import ProgramInfo
from tinkercloud_protocol.responses.listings import ListedModel, Quota
from tinkercloud_protocol.responses.problems import Problem, ProblemList
from tinkercloud_protocol.wire.errors import WireError

router = APIRouter(prefix="/api/v1", tags=["problems"])

_MAX_RUNS = 100
"""Runs that are looked at, the last used first."""
_STUCK_AFTER = {"waiting": timedelta(minutes=10), "running": timedelta(hours=1)}
"""How long no request of a run finishes until that is a problem, by the state of the next one. One
that runs may be the save or the first load of a large model."""
_FAILED_WITHIN = timedelta(days=7)
"""How long a program that has failed is a problem."""
_EVERY_OWNER = Page(0, 1 << 31)
_SAVE = "save its state now: tinkercloud runs save {run}"
_STUCK = (
    "look at the log of its session head, and at tinkercloud runs timeline {run}; if its client is"
    " gone, end the run: tinkercloud runs stop {run}"
)
_SLOW = (
    "wait if a large model is being saved or loaded; otherwise look at the log of its session head,"
    " or end the run: tinkercloud runs stop {run}"
)
_SILENT = (
    "look at the log of its session head; if that does not continue, kill the process of the head"
    " (`tinkercloud doctor` names it; on Kubernetes, delete its pod), and the next one continues"
)


@router.get("/problems")
@names_no_object
async def list_problems(server: Server, caller: Caller) -> ProblemList:
    """List what needs attention of what the caller may see, the newest first.

    Only admins see disks, pools, the conditions of BaseModels, and the quotas of all.
    """
    moment = now()
    found = [*await _of_store(server)]
    found += await _of_storage(server, caller, is_store_well=not found)
    if caller.role is Role.ADMIN:
        found += await asyncio.to_thread(lambda: list(_of_disks(server)))
    models = await server.base_models.listed(caller)
    loading = {model.model_name for model in models if _is_loading(model)}
    found += _of_models(models)
    found += await _of_quotas(server, caller)
    conditions, explained = await _of_conditions(server, caller)
    found += conditions
    visible = caller.visible("accessible")
    runs, _ = await server.runs.states.search(RunSearch(visible), None, Page(0, _MAX_RUNS))
    for row, place in runs:
        found += of_run(row, place, loading, explained, moment)
    found += _of_token_rates(runs, caller)
    owner = caller.owner_filter("accessible")
    found += map(_of_program, await server.programs.failed(owner, moment - _FAILED_WITHIN))
    return ProblemList(problems=server.first_seen.dated(found, moment))


async def _of_store(server: Context) -> list[Problem]:
    try:
        await server.checkpoints.ping()
    except WireError as error:
        remedy = "check its address, its credentials and its free space; training continues so far"
        return [
            Problem(kind="store", subject="checkpoint store", reason=error.message, remedy=remedy)
        ]
    return []


def _of_disks(server: Context) -> Iterator[Problem]:
    for disk in full_disks(server.settings):
        is_full = disk.free_bytes == 0
        yield Problem(
            kind="disk",
            subject=str(disk.folder),
            reason=f"its disk is {'' if is_full else 'nearly '}full: {binary_size(disk.free_bytes)}"
            " free",
            remedy="delete old checkpoints (tinkercloud checkpoints keep), or move the folder to a"
            " larger disk",
        )


def _of_models(listed: list[ListedModel]) -> Iterator[Problem]:
    for model in listed:
        if model.state is not None and model.state.startswith("failed"):
            yield Problem(
                kind="model",
                subject=model.model_name,
                reason=model.state,
                remedy="correct what it names, then restart the server or add the model again",
            )


async def _of_quotas(server: Context, caller: Principal) -> list[Problem]:
    own = await server.quotas.of(caller.owner)
    if caller.role is not Role.ADMIN:
        return list(_of_quota(own, caller.owner)) if own is not None else []
    found = list[Problem]()
    for quota in await server.quotas.of_all():
        is_own = own is not None and own.tenant == quota.tenant
        found += _of_quota(quota, caller.owner if is_own else None)
    return found


def _of_quota(quota: Quota, owner: str | None) -> Iterator[Problem]:
    for limit in quota.limits:
        if limit.limit is not None and limit.used is not None and limit.used >= limit.limit:
            yield Problem(
                kind="quota",
                subject=f"{limit.name} of tenant {quota.tenant}",
                owner=owner,
                reason=f"{limit.used} of {limit.limit} are used",
                remedy="end runs or delete checkpoints, or ask an admin for more",
            )


async def _of_storage(server: Context, caller: Principal, *, is_store_well: bool) -> list[Problem]:
    """Return the owners whose next checkpoint with a new name would be refused."""
    limit, whose = server.settings.max_checkpoint_bytes_per_owner, caller.owner_filter("accessible")
    if limit is None:
        return []
    used = Counter({caller.owner: 0, **await server.catalog.sizes_of_uploads(whose)})
    # The checkpoints of the last minute are counted only if their manifests can be read.
    source = server.checkpoints if is_store_well else server.catalog
    for each in await source.storage(whose, _EVERY_OWNER):
        used[each.owner] += each.size_bytes
    return [
        Problem(
            kind="quota",
            subject=f"max_checkpoint_bytes_per_owner of owner {owner}",
            owner=owner,
            reason=f"checkpoints, unfinished uploads and copies use {size} of {limit} bytes",
            remedy="delete checkpoints (tinkercloud checkpoints keep), or ask an admin for more",
        )
        for owner, size in sorted(used.items())
        if size >= limit
    ]


def _of_token_rates(
    runs: Sequence[tuple[TrainingRun, Whereabouts]], caller: Principal
) -> Collection[Problem]:
    """Return the owners whose runs wait since they have used the tokens of the minute."""
    found = dict[str, Problem]()
    for row, place in runs:
        reason, remedy = place.queue_reason or "", remedy_of_wait(place, row.id)
        if TOKENS_PER_MINUTE in reason and remedy is not None and caller.may_see(row.owner):
            subject = f"tokensPerMinute of owner {row.owner}"
            found[row.owner] = Problem(
                kind="quota", subject=subject, owner=row.owner, reason=reason, remedy=remedy
            )
    return found.values()


async def _of_conditions(
    server: Context, caller: Principal
) -> tuple[list[Problem], Collection[str]]:
    """Return the failing conditions that a caller may see, and the runs that they explain."""
    failing = server.provider.failing_conditions()
    named = {each.model_id for each in failing if each.model_id is not None}
    visible = await server.catalog.visible_runs(named, caller.visible("accessible"))
    problems, explained = list[Problem](), set[str]()
    for each in failing:
        if each.owner is None:
            is_visible = caller.role is Role.ADMIN
        elif each.model_id is None:
            is_visible = caller.may_see(each.owner)
        else:
            is_visible = each.model_id in visible
        if is_visible:
            explained.add(each.model_id or "")
            problems.append(
                Problem(
                    kind=each.kind,
                    subject=each.name,
                    owner=each.owner,
                    run_id=each.model_id,
                    reason=each.reason,
                    remedy=each.remedy,
                    since=each.since,
                )
            )
    return problems, explained


def _is_loading(model: ListedModel) -> bool:
    return (model.state or "").startswith(("loading", "downloading", "not loaded"))


def of_run(
    row: TrainingRun,
    place: Whereabouts,
    loading: Collection[str],
    explained: Collection[str],
    moment: datetime,
) -> Iterator[Problem]:
    """Yield what needs attention of a run.

    Args:
        row: the run.
        place: where its model is.
        loading: base models that load, for which their runs just wait.
        explained: runs of which a condition of their session says what they wait for.
        moment: the present time.
    """
    for cause, reason, remedy, since in _causes(row, place, loading, explained, moment):
        yield Problem(
            kind="run",
            subject=row.id,
            owner=row.owner,
            run_id=row.id,
            cause=cause,
            reason=reason,
            remedy=remedy,
            since=since,
            last_used_at=row.last_request_at,
        )


def _causes(
    row: TrainingRun,
    place: Whereabouts,
    loading: Collection[str],
    explained: Collection[str],
    moment: datetime,
) -> Iterator[tuple[str, str, str, datetime | None]]:
    """Yield each problem of a run: its cause, reason, remedy and, if it is known, its start."""
    held = place.held
    # A run that ends since its owner has deleted its session is no problem.
    is_wanted = place.state != "ending" or place.queue_state != "idle"
    if (remedy := remedy_of_state(place, row.id)) is not None and is_wanted:
        yield "state", place.reason or f"the run is {place.state}", remedy, None
    if place.reason == HEAD_IS_SILENT:
        yield "silence", place.reason, _SILENT, None
    waits_for_others = row.base_model in loading or row.id in explained
    if (remedy := remedy_of_wait(place, row.id)) is not None and not waits_for_others:
        why = place.queue_reason or f"its next request is {place.queue_state}"
        # A run that has no model yet waits since it was created.
        yield "wait", why, remedy, None if row.generation else row.created_at
    # The head of a run that is ending saves it.
    if held is None or place.state == "ending":
        return
    waited = timedelta(seconds=held.waiting_seconds)
    limit = _STUCK_AFTER.get(place.queue_state)
    if limit is not None and waited >= limit and held.tokens_per_minute == 0:
        minutes, remedy = waited // timedelta(minutes=1), _STUCK
        why = f"it is stuck: for {minutes} minutes no request has finished, although some wait"
        if place.queue_state == "running":
            why, remedy = f"it may be stuck: its request has run for {minutes} minutes", _SLOW
        elif place.queue_reason is not None:
            why = f"{why} ({place.queue_reason})"
        yield "standstill", why, remedy.format(run=row.id), moment - waited
    save = _SAVE.format(run=row.id)
    if held.degraded is not None:
        yield "degraded", f"a kill of its head would lose steps: {held.degraded}", save, None
    if held.autosave_failure is not None:
        yield "autosave", f"it has no automatic checkpoint: {held.autosave_failure}", save, None


def _of_program(program: ProgramInfo) -> Problem:
    return Problem(
        kind="program",
        subject=program.program_id,
        owner=program.owner,
        run_id=program.model_id,
        reason=f"{program.name} has failed: {program.message or 'it gave no reason'}",
        remedy=f"read its output: tinkercloud programs logs {program.program_id}; then correct it"
        " and start it again",
        since=program.finished_at,
    )
