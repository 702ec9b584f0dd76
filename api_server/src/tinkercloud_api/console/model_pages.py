"""The page about base models: their state, their pools, and which runs occupy or wait for them."""

from fastapi.responses import Response

from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.console.pages import Session, page_router, show
from tinkercloud_api.context import Server
from tinkercloud_api.heads.shared_heads import models_of
from tinkercloud_api.routes.models import base_model_routes
from tinkercloud_api.routes.sessions import run_state_routes

_RUNS = 100
"""Runs that are looked at, the last used first."""
_PLACED = {"live", "dedicated", "waiting"}
"""States of the runs that the page shows."""

router = page_router()


@router.get("/models")
@names_no_object
async def show_models(server: Server, session: Session) -> Response:
    """Show the base models, and the runs that the caller may see and that have or want a place."""
    caller = session.caller
    answers = await server.shared_heads.shown()
    by_id, by_cluster = models_of(answers), server.shared_heads.by_cluster(answers)
    listed = await server.base_models.listed(caller)
    models = base_model_routes.with_memory(listed, by_cluster)
    runs = await run_state_routes.last_used_runs(server, caller, _RUNS, by_id)
    held = by_id.values()
    return await show(
        "models.html",
        session=session,
        models=models,
        has_pools=any(model.pool is not None for model in models),
        clusters=[(each, of) for each in models if each.pool for of in each.pool.by_cluster],
        has_gpus=any(model.gpus is not None for model in models),
        looked_at=_RUNS,
        runs=[run for run in runs if run.state in _PLACED],
        in_memory=sum(not model.is_suspended for model in held),
        suspended=sum(model.is_suspended for model in held),
        memory_bytes=sum(model.memory_bytes for model in held),
        twin="base_models",
        command="tinkercloud models list",
    )
