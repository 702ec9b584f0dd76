"""What needs attention: failing models and stores, runs that are lost or wait, limits reached."""

from collections.abc import Collection, Iterator

from fastapi import APIRouter

from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.catalog.runs.run_search import RunSearch
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import TrainingRun
from tinkercloud_api.context import Caller, Context, Server
from tinkercloud_api.heads.run_states import Whereabouts
from tinkercloud_protocol.responses.listings import ListedModel, Quota
from tinkercloud_protocol.responses.problems import Problem, ProblemList
from tinkercloud_protocol.wire.errors import WireError

router = APIRouter(prefix="/api/v1", tags=["problems"])

_MAX_RUNS = 100
"""Runs that are looked at, the last used first."""
_SAVE = "save its state now: tinkercloud runs save {run}"
_REMEDIES = {
    "lost": "continue it from a checkpoint: tinkercloud runs attach {run}",
    "unknown": "look at the checkpoint store and the disk of the server, which do not respond",
    "paused_capacity": "end a run that nobody needs (tinkercloud runs stop), or raise the limit or"
    " the memory that the reason names",
    "paused_rate_limit": "wait, or ask an admin for more tokensPerMinute",
}


@router.get("/problems")
@names_no_object
async def list_problems(server: Server, caller: Caller) -> ProblemList:
    """List what needs attention of what the caller may see."""
    found = [*await _of_store(server)]
    models = await server.base_models.listed(caller)
    loading = {model.model_name for model in models if _is_loading(model)}
    found += _of_models(models)
    found += _of_quota(caller.owner, await server.quotas.of(caller.owner))
    visible = caller.visible("accessible")
    runs, _ = await server.runs.states.search(RunSearch(visible), None, Page(0, _MAX_RUNS))
    for row, place in runs:
        found += of_run(row, place, loading)
    return ProblemList(problems=found)


async def _of_store(server: Context) -> list[Problem]:
    try:
        await server.checkpoints.ping()
    except WireError as error:
        remedy = "check its address, its credentials and its free space; training continues so far"
        return [
            Problem(kind="store", subject="checkpoint store", reason=error.message, remedy=remedy)
        ]
    return []


def _of_models(listed: list[ListedModel]) -> Iterator[Problem]:
    for model in listed:
        if model.state is not None and model.state.startswith("failed"):
            yield Problem(
                kind="model",
                subject=model.model_name,
                reason=model.state,
                remedy="correct what it names, then restart the server or add the model again",
            )


def _of_quota(owner: str, quota: Quota | None) -> Iterator[Problem]:
    for limit in quota.limits if quota is not None else []:
        if limit.limit is not None and limit.used is not None and limit.used >= limit.limit:
            yield Problem(
                kind="quota",
                subject=limit.name,
                owner=owner,
                reason=f"{limit.used} of {limit.limit} are used",
                remedy="end runs or delete checkpoints, or ask an admin for more",
            )


def _is_loading(model: ListedModel) -> bool:
    return (model.state or "").startswith(("loading", "downloading", "not loaded"))


def of_run(row: TrainingRun, place: Whereabouts, loading: Collection[str]) -> Iterator[Problem]:
    """Yield what needs attention of a run.

    Args:
        row: the run.
        place: where its model is.
        loading: base models that load, for which their runs just wait.
    """
    held, causes = place.held, list[tuple[str, str]]()
    causes.append((place.state, place.reason or f"the run is {place.state}"))
    if row.base_model not in loading:
        causes.append(
            (place.queue_state, place.queue_reason or f"its next request is {place.queue_state}")
        )
    found = [(why, _REMEDIES[what]) for what, why in causes if what in _REMEDIES]
    if held is not None and held.degraded is not None:
        found.append((f"a kill of its head would lose steps: {held.degraded}", _SAVE))
    if held is not None and held.autosave_failure is not None:
        found.append((f"it has no automatic checkpoint: {held.autosave_failure}", _SAVE))
    for reason, remedy in found:
        yield Problem(
            kind="run",
            subject=row.id,
            owner=row.owner,
            reason=reason,
            remedy=remedy.format(run=row.id),
            last_used_at=row.last_request_at,
        )
