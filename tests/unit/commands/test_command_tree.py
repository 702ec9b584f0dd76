"""Which options all `tinkercloud` commands have: no new command can forget them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from tinkercloud_api.cli import app
from tinkercloud_testing.resources.charts import ROOT

WITHOUT_JSON = {
    "serve": "prints what happens while it runs",
    "demo": "prints what happens while it runs",
    "drain": "prints what happens while it runs",
    "runs attach": "prints Python",
    "logs": "prints a log",
    "audit export": "prints JSON lines in any case",
}
"""Commands without --json, and why."""
READ_ONLY = {
    *("top", "problems", "plan", "logs", "usage", "doctor", "cluster check", "console"),
    *("keys list", "users list", "users show", "projects list", "projects show"),
    *("models list", "sessions list", "sessions show", "audit export", "audit verify"),
    *("runs list", "runs show", "runs curve", "runs timeline", "runs compare"),
    *("programs list", "programs show", "programs logs", "programs rewards", "checkpoints list"),
    *("pools list", "pools show"),
}
ADD_SOMETHING = {
    *("serve", "demo", "ask", "keys create", "users create", "users enable", "projects create"),
    *("backup create", "backup verify", "catalog rebuild", "models add", "runs save"),
    *("programs run", "programs rlve", "checkpoints import"),
    *("checkpoints export", "checkpoints merge"),
}
WITHOUT_YES = {
    "keys rotate": "the old key works until --overlap ends",
    "users set-role": "another call undoes it",
    "projects rename": "another call undoes it",
    "projects set-member": "another call undoes it",
    "projects move": "another call undoes it",
    "checkpoints publish": "another call undoes it",
    "checkpoints unpublish": "another call undoes it",
    "checkpoints ttl": "another call undoes it",
    "runs export": "it replaces only what it has written itself",
    "drain": "sessions continue on another node; --cordon says that it is meant",
}
"""Commands that change something and do not ask, and why."""


def commands(group: object, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield all commands with their options."""
    for word, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{name} {word}".strip())
    if not hasattr(group, "commands"):
        yield name, {option for each in getattr(group, "params", ()) for option in each.opts}


def without(option: str) -> set[str]:
    """Return the commands without an option."""
    return {name for name, options in commands(get_command(app)) if option not in options}


def test_the_page_about_troubleshooting_lists_every_command() -> None:
    page = (ROOT / "docs" / "use" / "troubleshooting.md").read_text()
    listed: set[str] = set()
    for words in re.findall(r"`([^`]+)`", page[page.index("\nCommands: ") :]):
        group, *names = re.split(r"[ |]", words.removeprefix("tinkercloud "))
        listed |= {f"{group} {name}" for name in names} or {group}

    found = dict(commands(get_command(app)))
    unlisted = {name for name in found if not {name, name.partition(" ")[0]} & listed}
    assert unlisted == set()


def test_every_command_prints_json_for_programs() -> None:
    assert without("--json") == set(WITHOUT_JSON)


def test_every_command_that_deletes_or_stops_something_can_be_answered_in_advance() -> None:
    assert without("--yes") == READ_ONLY | ADD_SOMETHING | set(WITHOUT_YES)


def run(state_dir: Path, *arguments: str, answer: str = "") -> Result:
    """Run a command that uses a state folder."""
    environment = {"TINKERCLOUD_STATE_DIR": str(state_dir)}
    return CliRunner().invoke(app, [*arguments], input=answer, env=environment)


@pytest.mark.parametrize("command", [("keys", "revoke", "1"), ("users", "disable", "ann")])
def test_what_ends_something_is_done_only_when_it_is_agreed_to(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    run(tmp_path, "keys", "create", "laptop", "--owner", "ann")

    unasked = run(tmp_path, *command)
    assert unasked.exit_code == 1
    assert "there is no terminal to ask in; use --yes" in unasked.stderr
    declined = run(tmp_path, *command, answer="n\n")
    assert (declined.exit_code, "ann" in declined.stderr) == (1, True)
    (key,) = json.loads(run(tmp_path, "keys", "list", "--json").stdout)
    (user,) = json.loads(run(tmp_path, "users", "list", "--json").stdout)
    assert (key["revoked"], user["state"]) == ("", "enabled")

    agreed = run(tmp_path, *command, "--json", answer="y\n")
    assert agreed.exit_code == 0, agreed.stderr
    # The answer is shown first, as a terminal does.
    assert json.loads(agreed.stdout.splitlines()[-1])
    (key,) = json.loads(run(tmp_path, "keys", "list", "--json").stdout)
    (user,) = json.loads(run(tmp_path, "users", "list", "--json").stdout)
    assert (key["revoked"], user["state"]) != ("", "enabled")
