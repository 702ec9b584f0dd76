"""`tinkercloud runs samples`: the prompts and answers of a run whose text is kept."""

import textwrap
from typing import Annotated, Any

import typer

from tinkercloud_api.commands.common.shared import (
    ApiKey,
    BaseUrl,
    Json,
    Yes,
    confirm,
    fail,
    request,
    say,
)
from tinkercloud_api.commands.run_commands import RunArgument, path_of
from tinkercloud_api.config.readable import moment

_SWITCHED = {
    True: "The text of some samples of run {run} is kept from now on.",
    False: "No further samples of run {run} are kept; --delete deletes those that were.",
}


def show_samples(
    run: RunArgument,
    api_key: ApiKey,
    base_url: BaseUrl = None,
    limit: Annotated[
        int, typer.Option(min=1, max=256, help="Maximum number of samples to show.")
    ] = 20,
    *,
    keep: Annotated[
        bool | None,
        typer.Option("--on/--off", help="Keep the text of some samples from now on, or of none."),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete those that were kept, and keep no others.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Show the last prompts and answers of a run; keep them, which it does not do by itself.

    Everybody who may see the run can read them.
    """
    path = f"{path_of(run)}/samples"
    if delete:
        if keep is not None:
            fail("--delete: it turns the switch off; leave out --on and --off")
        confirm(f"Delete the text of all samples of run {run}?", skipped=yes)
        answer = request("DELETE", base_url, api_key, path)
        say(f"The samples of run {run} are deleted.", answer, as_json=as_json)
    elif keep is not None:
        answer = request("PUT", base_url, api_key, path, {"keep": keep})
        say(_SWITCHED[keep].format(run=run), answer, as_json=as_json)
    else:
        found = request("GET", base_url, api_key, f"{path}?limit={limit}")
        say(_listed(found), found, as_json=as_json)


def _listed(found: dict[str, Any]) -> str:
    if found["samples"]:
        return "\n\n".join(_text(each) for each in found["samples"])
    if found["keep"]:
        return f"Nothing was sampled from run {found['run_id']} since its samples are kept."
    return f"The samples of run {found['run_id']} are not kept; --on keeps the text of some."


def _text(sample: dict[str, Any]) -> str:
    before, after = sample["prompt_tokens_left_out"], sample["answer_tokens_left_out"]
    parts = [
        f"step {sample['step']}, {moment(sample['time'])}",
        f"prompt{f', without {before} earlier tokens' if before else ''}:",
        textwrap.indent(sample["prompt"], "  "),
        f"answer{f', without {after} further tokens' if after else ''}:",
        textwrap.indent(sample["answer"], "  "),
    ]
    return "\n".join(parts)
