"""`tinkercloud models` and `pools`: base models of a server, to list, add and remove; clusters."""

import json
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tinkercloud_api.commands.common.progress import StateProgress
from tinkercloud_api.commands.common.shared import (
    ApiKey,
    BaseUrl,
    Json,
    Watch,
    Yes,
    confirm,
    fail,
    request,
    say,
    show,
    watch,
)
from tinkercloud_api.config.model_places import PlaceError, absolute
from tinkercloud_api.config.readable import binary_size, moment

app = typer.Typer(
    help="List, add and remove the base models of a running server.", no_args_is_help=True
)
pools_app = typer.Typer(
    help="List the clusters that runs share (Kubernetes).", no_args_is_help=True
)

_COLUMNS = ["model_name", "max_context_length", "runs", "source", "state"]
_COLUMNS_WITH_GPUS = [*_COLUMNS[:3], "gpus_idle", "gpu_hours_idle", *_COLUMNS[3:]]
_CLUSTER_COLUMNS = [
    *("cluster", "model", "state", "slots", "memory", "free", "gpus", "idle since"),
    *("gpu hours idle", "owners"),
]
_POOL_COLUMNS = ["model", "slots", "memory", "free", "waiting", "gpus_idle", "gpu_hours_idle"]
_UNFINISHED = ("downloading", "loading")
"""How the states of a model begin that will be served."""
_POLL_SECONDS = 0.5

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model in the API.")]


@app.command("list")
def list_models(
    api_key: ApiKey, base_url: BaseUrl = None, *, as_json: Json = False, again: Watch = False
) -> None:
    """List base models: how many runs use each, where it is from (for admins), and its state.

    On Kubernetes also how many of its GPUs are idle, and the hours of that: in all, this month and
    last month. JSON has more months.
    """

    def draw() -> None:
        found = _listed(api_key, base_url)
        columns = _COLUMNS_WITH_GPUS if any(each["gpus"] for each in found) else _COLUMNS
        show(found if as_json else [_row(each) for each in found], columns, as_json=as_json)

    watch(draw, again=again)


def _row(model: dict[str, Any]) -> dict[str, object]:
    return {
        "model_name": ", ".join([model["model_name"], *model["aliases"]]),
        "max_context_length": model["max_context_length"] or "",
        "runs": model["runs"],
        **_idle(model["gpus"]),
        "source": model["source"] or "",
        "state": model["state"] or "unknown",
    }


def _idle(gpus: dict[str, Any] | None) -> dict[str, object]:
    if gpus is None:
        return {"gpus_idle": "", "gpu_hours_idle": ""}
    this_and_last_month = list(gpus["idle_gpu_hours_by_month"].items())[:2]
    hours = [("in all", gpus["idle_gpu_hours"]), *this_and_last_month]
    return {
        "gpus_idle": f"{gpus['idle_gpus']} of {gpus['gpus']}",
        "gpu_hours_idle": ", ".join(f"{when}: {number:.5g}" for when, number in hours),
    }


@app.command("add")
def add_model(
    name: NameArgument,
    *,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    path: Annotated[
        str | None,
        typer.Option(
            help="Folder in Hugging Face format on the machine of the server, or another model ID."
            " Default: NAME is a model ID, which is downloaded unless the cache has it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve another base model, now and after each restart, and wait until it is ready (admins).

    Ctrl-C ends only the waiting.
    """
    where = path or name
    # What this machine can't read, the server may.
    with suppress(PlaceError):
        where = absolute(where)
    request("POST", base_url, api_key, "base_models", {"name": name, "source": where})
    wait_until_loaded(name, api_key, base_url)
    model = _named(name, api_key, base_url)
    if model is None:
        fail(f"{name} was removed meanwhile")
    if model["state"].startswith("failed"):
        fail(
            f"{name}: {model['state']}; `tinkercloud models add` tries again, and `tinkercloud"
            " models remove` forgets it"
        )
    say(f"{name}: {model['state']}", model, as_json=as_json)


@app.command("remove")
def remove_model(
    name: NameArgument,
    *,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Serve a base model without runs no longer, and free its memory (admins).

    Its files, and the checkpoints that were trained on it, stay.
    """
    used = {each["model_name"]: each["runs"] for each in _listed(api_key, base_url)}
    if used.get(name) and not yes:
        fail(f"runs use {name} ({used[name]}); end each with `tinkercloud runs stop RUN`")
    confirm(
        f"Stop serving {name}, also to clients that sample it?", skipped=yes or name not in used
    )
    removed = request("DELETE", base_url, api_key, f"base_models/{quote(name, safe='')}")
    sentence = f"{name} {'is not served any more' if removed['was_served'] else 'was not served'}"
    if removed["returns_at_start"]:
        sentence += ", until the next start: a setting or --model names it"
    say(sentence, removed, as_json=as_json)


def wait_until_loaded(name: str, api_key: str, base_url: str | None) -> bool:
    """Show how far a model is while it is downloaded or loads; return whether it was not ready."""
    progress, has_waited = StateProgress(), False
    try:
        while (model := _named(name, api_key, base_url)) and _is_unfinished(model):
            progress(f"{name}: {model['state']}")
            time.sleep(_POLL_SECONDS)
            has_waited = True
    finally:
        progress.finish()
    return has_waited


def _is_unfinished(model: dict[str, Any]) -> bool:
    return (model["state"] or "").startswith(_UNFINISHED)


def _named(name: str, api_key: str, base_url: str | None) -> dict[str, Any] | None:
    listed = _listed(api_key, base_url)
    return next((each for each in listed if each["model_name"] == name), None)


def _listed(api_key: str, base_url: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = request("GET", base_url, api_key, "base_models")["base_models"]
    return found


@pools_app.command("list")
def list_pools(
    api_key: ApiKey, base_url: BaseUrl = None, *, as_json: Json = False, again: Watch = False
) -> None:
    """List the clusters of pools: slots, memory, GPUs, since when they are idle, and who is there.

    Owners are those of the last 100 runs that you may see, with the number of their runs. A second
    table sums up each pool; idle GPU hours there are of all pods of its base model, and by month.
    """

    def draw() -> None:
        models = _listed(api_key, base_url)
        clusters = clusters_of(models, _runs(api_key, base_url))
        if not clusters and not as_json:
            typer.echo("No pool has a cluster now.")
            return
        rows = [each if as_json else cluster_row(each) for each in clusters]
        show(rows, _CLUSTER_COLUMNS, as_json=as_json)
        if not as_json:
            pools = [_pool_row(each) for each in models if each["pool"] is not None]
            show(pools, _POOL_COLUMNS, as_json=False)

    watch(draw, again=again)


def _pool_row(model: dict[str, Any]) -> dict[str, object]:
    pool = model["pool"]
    return {
        "model": model["model_name"],
        "slots": f"{pool['models']} of {pool['slots']}",
        **_memory(pool),
        "waiting": pool["waiting"],
        **_idle(model["gpus"]),
    }


def _memory(used: dict[str, Any]) -> dict[str, object]:
    """Return the memory of a pool or a cluster as the columns of a table show it."""
    sizes = {"memory": used["memory_bytes"], "free": used["free_bytes"]}
    return {name: "" if size is None else binary_size(size) for name, size in sizes.items()}


@pools_app.command("show")
def show_cluster(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="Name of a pool cluster.")],
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    as_json: Json = False,
) -> None:
    """Show a cluster of a pool, and those of the last 100 runs that you may see that are on it."""
    found = clusters_of(_listed(api_key, base_url), _runs(api_key, base_url))
    known = next((each for each in found if each["name"] == cluster), None)
    if known is None:
        names = ", ".join(each["name"] for each in found) or "none"
        fail(f"CLUSTER: got {cluster!r}; the clusters of pools are: {names}")
    if as_json:
        typer.echo(json.dumps(known))
        return
    show([cluster_row(known)], _CLUSTER_COLUMNS, as_json=False)
    show(known["runs"], ["run_id", "owner", "state", "queue_state"], as_json=False)


def clusters_of(
    models: Iterable[dict[str, Any]], runs: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the clusters of base models' pools, each with its model and those of the runs on it.

    Args:
        models: those of GET base_models.
        runs: those of GET runs.
    """
    there = list(runs)
    return [
        {
            "model_name": model["model_name"],
            **cluster,
            "runs": [run for run in there if run.get("cluster") == cluster["name"]],
        }
        for model in models
        if model["pool"] is not None
        for cluster in model["pool"].get("by_cluster", ())
    ]


def cluster_row(cluster: dict[str, Any]) -> dict[str, object]:
    """Return a cluster (`clusters_of`) as the columns of a table show it."""
    owners = Counter(run["owner"] for run in cluster["runs"])
    return {
        "cluster": cluster["name"],
        "model": cluster["model_name"],
        "state": cluster["state"],
        "slots": f"{cluster['models']} of {cluster['slots']}",
        **_memory(cluster),
        "gpus": cluster["gpus"],
        "idle since": moment(cluster["idle_since"]),
        "gpu hours idle": f"{cluster['idle_gpu_hours']:.5g}",
        "owners": ", ".join(f"{owner}: {number}" for owner, number in sorted(owners.items())),
    }


def _runs(api_key: str, base_url: str | None) -> list[dict[str, Any]]:
    path = "runs?access_scope=accessible&limit=100"
    found: list[dict[str, Any]] = request("GET", base_url, api_key, path)["runs"]
    return found
