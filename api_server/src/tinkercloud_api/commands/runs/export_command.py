"""`tinkercloud runs export`: the curve of a run in MLflow or Weights & Biases."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tinkercloud_api.commands.common.progress import waiting
from tinkercloud_api.commands.common.shared import (
    ApiKey,
    BaseUrl,
    Json,
    fail,
    pip_install,
    request,
    say,
)
from tinkercloud_api.commands.run_commands import RunArgument, path_of

_RUN_TAG = "tinkercloud.run"
"""Tag of an MLflow run with the id of the run that it shows."""
_MLFLOW_BATCH = 1000
"""Metrics that MLflow accepts in one call."""


@dataclass(frozen=True, slots=True)
class Point:
    """Values of one step."""

    time: float
    """Seconds from 1970-01-01 in UTC."""
    step: int
    values: dict[str, float]


def points_of(curve: dict[str, Any]) -> list[Point]:
    """Return the points of a curve, the earliest first.

    Where a point is of several steps, its metric `loss` is the mean, and `loss_min` and `loss_max`
    are the lowest and the highest value. What the client has logged is named `logged/NAME`, with
    `_` for characters that MLflow refuses. Values that are not finite are left out.

    Args:
        curve: the response of GET runs/{id}/curve.
    """
    found = [_point(each, _values(each)) for each in curve["points"]]
    for name, logged in curve["logged"].items():
        key = f"logged/{_accepted(name)}"
        found += [_point(each, {key: each["value"]}) for each in logged]
    return sorted((each for each in found if each.values), key=lambda each: each.time)


def _point(of: dict[str, Any], values: dict[str, float]) -> Point:
    return Point(datetime.fromisoformat(of["time"]).timestamp(), of["step"], values)


def _values(point: dict[str, Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, metric in point["metrics"].items():
        if metric["mean"] is not None:
            values[name] = metric["mean"]
            if point["steps"] > 1:
                values |= {f"{name}_min": metric["low"], f"{name}_max": metric["high"]}
    return values


def _accepted(name: str) -> str:
    parts = [part for part in name.split("/") if part not in {"", ".", ".."}]
    return re.sub(r"[^\w./ -]", "_", "/".join(parts)) or "_"


def export_run(
    run: RunArgument,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    *,
    to: Annotated[Literal["mlflow", "wandb"], typer.Option(help="Where the curve is exported to.")],
    tracking_uri: Annotated[
        str | None,
        typer.Option(help="MLflow server or database. Default: MLFLOW_TRACKING_URI, or a file."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of MLflow's file, or of the offline runs of W&B (default: this one)."
        ),
    ] = None,
    project: Annotated[
        str, typer.Option(help="Experiment of MLflow, or project of W&B.")
    ] = "tinkercloud",
    as_json: Json = False,
) -> None:
    """Copy the curve of a run, and what its client has logged, to MLflow or Weights & Biases.

    An earlier export of the run to the same place is replaced. W&B is not contacted: `wandb sync`
    sends the folder that is printed.
    """
    from tinkercloud_protocol.wire.errors import InvalidRequest
    from tinkercloud_protocol.wire.ids import ModelId

    if tracking_uri is not None and (to == "wandb" or folder is not None):
        fail("--tracking-uri: use it with --to mlflow, and without --folder")
    try:
        run = str(ModelId.parse(run))
    except InvalidRequest as error:
        fail(f"RUN: {error.message}")
    with waiting(f"loading {to}"):
        client = _imported(to)
    # Earlier exports are deleted by this id, so the one from the command line is used, not the
    # one in the response.
    details = request("GET", base_url, api_key, path_of(run)) | {"run_id": run}
    points = points_of(request("GET", base_url, api_key, f"{path_of(run)}/curve"))
    if not points:
        fail(
            f"run {run} has no point yet: it took no optimizer step, and its client logged nothing"
        )
    with waiting(f"writing {len(points)} points to {to}"):
        if to == "mlflow":
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                tracking_uri = f"sqlite:///{folder.absolute()}/mlflow.db"
            place = _to_mlflow(client, details, points, tracking_uri, project)
        else:
            place = _to_wandb(client, details, points, folder or Path(), project)
    say(place, {"place": place, "points": len(points)}, as_json=as_json)


def _imported(package: str) -> Any:  # noqa: ANN401 - a module that may not be installed
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        fail(f"--to {package}: {error.name} is not installed; run `{pip_install(package)}`")


def _to_mlflow(
    mlflow: Any,  # noqa: ANN401 - as `_imported`
    run: dict[str, Any],
    points: Sequence[Point],
    tracking_uri: str | None,
    project: str,
) -> str:
    """Log points to a new run of MLflow, delete those of earlier exports, and return its place."""
    metrics = [
        mlflow.entities.Metric(name, value, int(point.time * 1000), point.step)
        for point in points
        for name, value in point.values.items()
    ]
    try:
        client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        home = client.get_experiment_by_name(project)
        home_id = client.create_experiment(project) if home is None else home.experiment_id
        earlier = client.search_runs([home_id], f"tags.`{_RUN_TAG}` = '{run['run_id']}'")
        made = client.create_run(
            home_id,
            start_time=int(points[0].time * 1000),
            tags={_RUN_TAG: run["run_id"], **_properties(run)},
            run_name=run["name"] or run["run_id"],
        ).info.run_id
        for start in range(0, len(metrics), _MLFLOW_BATCH):
            client.log_batch(made, metrics=metrics[start : start + _MLFLOW_BATCH])
        client.set_terminated(made, end_time=int(points[-1].time * 1000))
        for each in earlier:
            client.delete_run(each.info.run_id)
    except mlflow.exceptions.MlflowException as error:
        fail(f"MLflow: {error}")
    return f"run {made} of the MLflow experiment {project}"


def _to_wandb(
    wandb: Any,  # noqa: ANN401 - as `_imported`
    run: dict[str, Any],
    points: Sequence[Point],
    folder: Path,
    project: str,
) -> str:
    """Write an offline W&B run, delete earlier exports of it, and return its folder."""
    # W&B refuses colons.
    name = run["run_id"].replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    made = wandb.init(
        mode="offline",
        project=project,
        id=name,
        name=run["name"] or run["run_id"],
        dir=folder,
        config=_properties(run),
        settings=wandb.Settings(
            silent=True, console="off", save_code=False, x_disable_meta=True, x_disable_stats=True
        ),
    )
    # W&B's own steps only grow, but a run that loads an earlier checkpoint repeats numbers.
    made.define_metric("*", step_metric="step")
    for point in points:
        made.log({**point.values, "step": point.step, "_timestamp": point.time})
    made.finish()
    place = Path(made.dir).parent
    for found in folder.glob(f"wandb/offline-run-????????_??????-{name}"):
        if not found.samefile(place):
            shutil.rmtree(found)
    return str(place)


def _properties(run: dict[str, Any]) -> dict[str, str]:
    rank = run["lora_rank"] or "all weights"
    return {"owner": run["owner"], "base_model": run["base_model"], "lora_rank": str(rank)}
