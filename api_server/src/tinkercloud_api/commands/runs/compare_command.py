"""`tinkercloud runs compare`: a metric of several runs, side by side."""

import json
from typing import Annotated

import typer

from tinkercloud_api.commands.common.shared import ApiKey, BaseUrl, Json, request, show
from tinkercloud_api.commands.run_commands import mean_text, path_of


def compare_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids of the runs.")],
    api_key: ApiKey,
    base_url: BaseUrl = None,
    metric: Annotated[
        str, typer.Option(help="loss, grad_norm, learning_rate, tokens or kl.")
    ] = "loss",
    *,
    as_json: Json = False,
) -> None:
    """Show a metric of several runs by the number of steps that each has taken."""
    from tinkercloud_api.console.charts import by_steps_taken
    from tinkercloud_protocol.responses.run_states import RunCurve

    curves = [request("GET", base_url, api_key, f"{path_of(run)}/curve") for run in runs]
    if as_json:
        typer.echo(json.dumps(curves))
        return
    texts = {
        run: {
            step: mean_text(point.metrics[metric].model_dump())
            for step, point in by_steps_taken(RunCurve.model_validate(curve).points)
            if metric in point.metrics
        }
        for run, curve in zip(runs, curves, strict=True)
    }
    steps = sorted(set().union(*texts.values()))
    if not steps:
        typer.echo(f"None of these runs has reported {metric}.")
        return
    rows = [{"step": step, **{run: texts[run].get(step, "") for run in texts}} for step in steps]
    show(rows, ["step", *texts], as_json=False)
