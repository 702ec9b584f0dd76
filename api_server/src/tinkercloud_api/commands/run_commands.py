"""`tinkercloud runs`: how the runs of a server are doing; save, stop and continue them."""

import asyncio
import json
import time
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from tinkercloud_api.commands.common.progress import StateProgress
from tinkercloud_api.commands.common.shared import (
    WATCH_SECONDS,
    ApiKey,
    BaseUrl,
    CallError,
    Csv,
    Json,
    NoAnswerError,
    Watch,
    Yes,
    call,
    confirm,
    fail,
    request,
    say,
    say_line,
    server_url,
    show,
    show_csv,
    watch,
)
from tinkercloud_api.commands.model_commands import wait_until_loaded
from tinkercloud_api.config.readable import age_of, binary_size, moment

app = typer.Typer(
    help="List, save, stop and continue the runs of a running server.", no_args_is_help=True
)

_COLUMNS = [
    *("run", "owner", "project", "name", "model", "step", "loss", "tokens/min", "state", "queue"),
    *("age", "last seen", "why"),
]
"""The last one: why it waits, or is in its state."""
_CURVE_METRICS = ["loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "kl"]
_CURVE_COLUMNS = ["step", *_CURVE_METRICS, "time"]
_TIMELINE_COLUMNS = [
    *("accepted", "request", "waited s", "paused s", "ran s", "tokens", "of", "request id")
]
_NONE_FINISHED = (
    "No request has finished since the session head started. What the run waits for: tinkercloud"
    " runs show"
)
_CHECKPOINT_COLUMNS = ["step", "automatic", "size", "saved", "path"]
_FIRST_SAMPLER = 1 << 30
"""Sampling sessions of the model's own client count from 0."""
_CONTINUABLE = {"live", "suspended", "on disk", "dedicated"}
"""States of runs whose next request continues them."""
_MOST_IDLE = 3
"""Failures in turn to attach to a run for which nothing waits, after which the command fails."""
_GONE = {"lost": "is lost", "ended": "has ended"}
"""States of runs of which only checkpoints remain."""

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Id of the run, as `tinkercloud runs list` shows it.")
]

_ATTACHING = """\
import tinker
from tinker import types
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

run = {run!r}
service_client = tinker.ServiceClient({project})
holder = service_client.holder


async def attach():
    with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
        return await client.post("/api/v1/attach_model", cast_to=object, body={{"model_id": run}})


attached = holder.run_coroutine_threadsafe(attach()).result()
training_client = tinker.TrainingClient(
    holder,
    {index},
    types.ModelID(run),
    info=types.GetInfoResponse.model_validate_json(
        {info!r}
    ),
)
training_client._request_id_counter = attached["next_seq_id"] - 1
training_client._turn_counter = attached["next_seq_id"] - 1
holder._sampling_client_counter = {sampler} + attached["next_seq_id"]
{taken}"""
_RESTORING = """\
import tinker

service_client = tinker.ServiceClient({project})
training_client = service_client.create_training_client_from_state_with_optimizer(
    {path!r}
).result()
{taken}"""


@app.command("list")
def list_runs(
    api_key: ApiKey,
    base_url: BaseUrl = None,
    limit: Annotated[
        int, typer.Option(min=1, max=100, help="Maximum number of runs to list.")
    ] = 20,
    *,
    owner: Annotated[
        str | None, typer.Option(help="List the runs of this owner (admins only).")
    ] = None,
    everybody: Annotated[
        bool,
        typer.Option(
            "--all",
            help="List what you may see: also that of your projects, and for admins of all owners.",
        ),
    ] = False,
    search: Annotated[
        str,
        typer.Option(
            help="List those whose id, name, owner, model, project and metadata have words that"
            " begin with these."
        ),
    ] = "",
    status: Annotated[
        str,
        typer.Option(
            help="List those in this state: open (not ended), live, running, idle, waiting,"
            " suspended, 'on disk', dedicated, ending, lost, ended or unknown."
        ),
    ] = "",
    again: Watch = False,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """List runs: the last used first, and those that have ended last."""
    if as_csv and as_json:
        fail("--csv, --json: choose one of them")
    scope = "accessible" if everybody else "owned"
    query = {"limit": str(limit), "access_scope": scope}
    if owner is not None:
        query["owner"] = owner
    query |= {name: value for name, value in (("search", search), ("status", status)) if value}
    path = f"runs?{urlencode(query)}"

    def draw() -> None:
        found: list[dict[str, Any]] = request("GET", base_url, api_key, path)["runs"]
        if as_csv:
            from tinkercloud_protocol.responses.run_states import RunInfo

            rows = [{**each, "loss": mean_text(each.get("loss"))} for each in found]
            show_csv(rows, list(RunInfo.model_fields))
            return
        rows = [{**_row(each), "why": _why(each)} for each in found]
        show(found if as_json else rows, _COLUMNS, as_json=as_json)

    watch(draw, again=again)


def _row(run: dict[str, Any]) -> dict[str, object]:
    return {
        "run": run["run_id"],
        "owner": run["owner"],
        "project": run["project_id"] or "",
        "name": run["name"] or "",
        "model": run["base_model"],
        "step": "" if run["step"] is None else run["step"],
        "loss": mean_text(run["loss"]),
        "tokens/min": f"{run['tokens_per_minute']:.0f}",
        "state": run["state"],
        "queue": run["queue_state"],
        "age": age_of(run["created_at"]),
        "last seen": f"{age_of(run['last_seen_at'])} ago",
    }


def _why(run: dict[str, Any]) -> str:
    return str(run["queue_reason"] or run["reason"] or "")


@app.command("show")
def show_run(
    run: RunArgument, api_key: ApiKey, base_url: BaseUrl = None, *, as_json: Json = False
) -> None:
    """Show a run, and the checkpoints from which it can continue, automatic ones included."""
    found = _details(run, api_key, base_url)
    if as_json:
        typer.echo(json.dumps(found))
        return
    row = {**_row(found), "rank": found["lora_rank"] or "all weights", "reason": found["reason"]}
    row |= {"unsaved steps": found["unsaved_steps"], "queue reason": found["queue_reason"]}
    metadata = found.get("session_metadata", {}) | found.get("user_metadata", {})
    row |= {f"metadata {name}": value for name, value in metadata.items()}
    row["tags"] = ", ".join(found.get("tags", []))
    for name, value in row.items():
        if value not in {None, ""}:
            say_line(f"{name}: {value}")
    rows = [
        {
            "step": each["step"],
            "automatic": "yes" if each["is_automatic"] else "no",
            "size": binary_size(each["size_bytes"]),
            "saved": f"{age_of(each['time'])} ago",
            "path": each["tinker_path"],
        }
        for each in found["checkpoints"]
    ]
    show(rows, _CHECKPOINT_COLUMNS, as_json=False)


@app.command("curve")
def show_curve(
    run: RunArgument,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    again: Watch = False,
    as_json: Json = False,
) -> None:
    """Show the loss of a run as it learned, with gradient norm and learning rate.

    A row is a step; runs of more than 256 have several in one, up to its number, with their mean.
    """
    path = f"{path_of(run)}/curve"

    def draw() -> None:
        found = request("GET", base_url, api_key, path)
        if as_json:
            typer.echo(json.dumps(found))
        elif not found["points"]:
            typer.echo(f"Run {run} has taken no optimizer step yet.")
        else:
            show(_curve_rows(found["points"]), _CURVE_COLUMNS, as_json=False)

    watch(draw, again=again)


def _curve_rows(points: list[dict[str, Any]]) -> list[dict[str, object]]:
    return [
        {
            "step": each["step"],
            **{name: mean_text(each["metrics"].get(name)) for name in _CURVE_METRICS},
            "time": moment(each["time"]),
        }
        for each in points
    ]


def mean_text(metric: dict[str, Any] | None) -> str:
    """Return the mean of a metric of a curve's point; empty without one."""
    if metric is None:
        return ""
    if metric["not_finite"]:
        return "not finite"
    return f"{metric['mean']:.5g}"


@app.command("timeline")
def show_timeline(
    run: RunArgument,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="Maximum number of requests to show.")
    ] = 20,
    *,
    again: Watch = False,
    as_json: Json = False,
) -> None:
    """Show how long the last requests of a run, and of its samplers, waited and ran."""
    path = f"{path_of(run)}/timeline?limit={limit}"

    def draw() -> None:
        found = request("GET", base_url, api_key, path)
        if as_json:
            typer.echo(json.dumps(found))
        elif not found["requests"]:
            say_line(found["reason"] or f"{_NONE_FINISHED} {run}")
        else:
            show(
                [_request_row(each) for each in found["requests"]], _TIMELINE_COLUMNS, as_json=False
            )

    watch(draw, again=again)


def _request_row(found: dict[str, Any]) -> dict[str, object]:
    return {
        "accepted": moment(found["accepted_at"]),
        "request": found["name"],
        "waited s": f"{found['wait_seconds']:.3f}",
        "paused s": f"{found.get('paused_seconds', 0.0):.3f}",
        "ran s": f"{found['run_seconds']:.3f}",
        "tokens": found["tokens"],
        "of": found["target"],
        "request id": found["request_id"] or "",
    }


@app.command("save")
def save_run(
    run: RunArgument,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the checkpoint. Default: saved-step- and the step."),
    ] = None,
    *,
    as_json: Json = False,
) -> None:
    """Save a checkpoint of a run while its client trains, and print its path."""
    _say_wait("saving", _details(run, api_key, base_url))
    body = {"name": name} if name is not None else {}
    saved = request("POST", base_url, api_key, f"{path_of(run)}/save", body)
    say(saved["tinker_path"], saved, as_json=as_json)


@app.command("stop")
def stop_run(
    run: RunArgument,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    suspend: Annotated[
        bool,
        typer.Option("--suspend", help="Only free the memory of a run, until its next request."),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Save a run and end it, or suspend it; its checkpoints stay."""
    found = _details(run, api_key, base_url)
    confirm(f"{'Suspend' if suspend else 'End'} {_described(found)}?", skipped=yes)
    if not (suspend and found["state"] in {"suspended", "on disk"}):
        _say_wait("saving", found)
    answer = request("POST", base_url, api_key, f"{path_of(run)}/stop", {"suspend": suspend})
    say(answer["tinker_path"] or answer["state"], answer, as_json=as_json)


@app.command("attach")
def attach_run(
    run: RunArgument, api_key: ApiKey, base_url: BaseUrl = None, *, yes: Yes = False
) -> None:
    """Print the Python lines that continue a run in a new process, exactly where it is.

    Requests of its former client fail from now on. Each process that runs the lines continues from
    where the run is then, and shuts out the process before.
    """
    found = _details(run, api_key, base_url)
    if found["state"] in _CONTINUABLE:
        if found["is_connected"]:
            question = f"Shut out the client, if it still runs, of {_described(found)}?"
            confirm(question, skipped=yes)
        _say_wait("continuing", found)
        attached = _attach(found, api_key, base_url)
        typer.echo(_attaching(found, attached, api_key, base_url))
        return
    if found["state"] not in _GONE:
        fail(f"training run {run} can't be continued now: {found['reason']}")
    if not found["checkpoints"]:
        fail(f"training run {run} has no checkpoint to continue from ({found['reason']})")
    newest = found["checkpoints"][0]
    say_line(f"# Run {run} {_GONE[found['state']]}: {found['reason']}. This is a new run.")
    project, step = _project(found, api_key, base_url), newest["step"]
    lines = _RESTORING.format(project=project, path=newest["tinker_path"], taken=_taken(step, step))
    typer.echo(lines)


def _attach(run: dict[str, Any], api_key: str, base_url: str | None) -> dict[str, Any]:
    """Shut out other clients of a run that lives, once its model is loaded."""
    url, model = server_url(base_url), run["base_model"]
    wait_until_loaded(model, api_key, url)
    num_idle = 0
    while True:
        try:
            return asyncio.run(_attach_once(run["run_id"], api_key, url))
        except CallError as error:
            # The server waits for less time than a large model or many requests to repeat need.
            if not isinstance(error, NoAnswerError):
                fail(str(error))
            has_waited = wait_until_loaded(model, api_key, url)
            state = _details(run["run_id"], api_key, base_url)["queue_state"]
            num_idle = 0 if has_waited or state != "idle" else num_idle + 1
            if num_idle == _MOST_IDLE:
                fail(str(error))
            say_line(f"trying again: {error}", err=True)
            time.sleep(WATCH_SECONDS)


async def _attach_once(run_id: str, api_key: str, url: str) -> dict[str, Any]:
    """Shut out other clients of a run, and show what it waits for meanwhile.

    Raises:
        CallError: as `call`.
    """
    sending = call("POST", url, api_key, "attach_model", {"model_id": run_id})
    progress, attaching = StateProgress(), asyncio.ensure_future(sending)
    try:
        while not (await asyncio.wait([attaching], timeout=WATCH_SECONDS))[0]:
            found = await call("GET", url, api_key, path_of(run_id))
            reason = found["queue_reason"] or found["reason"] or "for its running request"
            progress(f"waiting: {reason}")
    finally:
        progress.finish()
    attached: dict[str, Any] = attaching.result()
    return attached


def _attaching(
    run: dict[str, Any], attached: dict[str, Any], api_key: str, base_url: str | None
) -> str:
    """Return the lines that continue a run that lives.

    Args:
        run: the run, as the server describes it.
        attached: the answer of the server to a client that attached to it.
        api_key: the caller's key.
        base_url: URL of the server; None means the running server of this machine.
    """
    info = request("POST", base_url, api_key, "get_info", {"model_id": run["run_id"]})
    # The lines attach again: numbers of requests that an earlier use has sent would return the
    # results of that time. The SDK counts requests from 0 and sends the number plus one. Each
    # sampler of unsaved weights needs a number that no earlier client of the model has used.
    return _ATTACHING.format(
        index=int(run["run_id"].rpartition(":")[2]),
        run=run["run_id"],
        project=_project(run, api_key, base_url),
        info=json.dumps(info),
        sampler=_FIRST_SAMPLER,
        taken=_taken(attached.get("step"), 'attached["step"]'),
    )


def _project(run: dict[str, Any], api_key: str, base_url: str | None) -> str:
    """Return the argument that puts what a client creates into the project of a run.

    It is empty for a run without a project, and for a viewer, who creates nothing in it.
    """
    project = run["project_id"]
    if project is None:
        return ""
    role = request("GET", base_url, api_key, f"projects/{quote(project, safe='')}")["role"]
    return "" if role == "viewer" else f"project_id={project!r}"


def _taken(step: int | None, value: object) -> str:
    """Return the lines that say how many steps a model has taken.

    Args:
        step: the steps; None if they are not known.
        value: the Python expression of their number when the lines run.
    """
    if step is None:
        return (
            "# The session head is of an earlier version, which does not say how many steps it"
            " took."
        )
    return (
        f"# The model has taken {step} steps: continue with the data of step {step + 1}.\n"
        f"step = {value}"
    )


def _details(run: str, api_key: str, base_url: str | None) -> dict[str, Any]:
    found: dict[str, Any] = request("GET", base_url, api_key, path_of(run))
    return found


def path_of(run: str) -> str:
    """Return the path of a run under /api/v1."""
    return f"runs/{quote(run, safe=':')}"


def _described(run: dict[str, Any]) -> str:
    """Return what a question says about a run."""
    name = f" ({run['name']})" if run["name"] else ""
    seen = age_of(run["last_seen_at"])
    return f"run {run['run_id']}{name} of {run['owner']}, step {run['step']}, last seen {seen} ago"


def _say_wait(what: str, run: dict[str, Any]) -> None:
    """Say what the command waits for: a large model takes minutes."""
    if run["state"] in _CONTINUABLE:
        size = run["memory_bytes"]
        place = f"{run['state']}, {binary_size(size)}" if size else run["state"]
        say_line(f"{what} a model of {run['base_model']} ({place}) ...", err=True)
