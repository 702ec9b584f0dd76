"""`tinkercloud runs compare`: a metric of several runs, side by side."""

import json
from typing import Annotated

import typer

from tinkercloud_api.commands.common.shared import ApiKey, BaseUrl, Json, request, say_line, show
from tinkercloud_api.commands.run_commands import mean_text, path_of


def compare_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids of the runs.")],
    api_key: ApiKey,
    base_url: BaseUrl = None,
    metric: Annotated[
        str,
        typer.Option(
            help="loss, grad_norm, learning_rate, kl, tokens, tokens_per_second, or what clients"
            " logged, by its name, such as reward."
        ),
    ] = "loss",
    *,
    as_json: Json = False,
) -> None:
    """Show a metric of several runs by step: the number of steps that each has taken.

    What clients logged has the steps with which they logged it.
    """
    from tinkercloud_api.console.curve_range import compared
    from tinkercloud_protocol.responses.run_states import RunCurve

    # A run that is named twice is one column.
    answers = {run: request("GET", base_url, api_key, f"{path_of(run)}/curve") for run in runs}
    if as_json:
        typer.echo(json.dumps(list(answers.values())))
        return
    metrics = compared([RunCurve.model_validate(each) for each in answers.values()])
    chosen = next((each for each in metrics if each.name == metric), None)
    if chosen is None:
        names = ", ".join(each.name for each in metrics)
        say_line(
            f"None of these runs has {metric}; choose --metric from: {names}."
            if names
            else f"None of these runs has reported {metric}, or anything else."
        )
        return
    rows = [
        {"step": step}
        | {
            run: mean_text(values.model_dump() if values is not None else None)
            for run, values in zip(answers, of_runs, strict=True)
        }
        for step, of_runs in chosen.rows.items()
    ]
    show(rows, ["step", *answers], as_json=False)
