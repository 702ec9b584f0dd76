"""`tinkercloud logs`: what a session head of this machine has logged."""

import os
import time
from collections import deque
from pathlib import Path
from typing import IO, Annotated

import typer

from tinkercloud_api.commands.common.local_catalog import StateDir, with_catalog
from tinkercloud_api.commands.common.shared import fail, read_settings

_FOLLOW_SECONDS = 0.5
"""Time between two looks at a log that is followed."""


def show_logs(
    name: Annotated[str, typer.Argument(help="Name of a served model, or id of a training run.")],
    lines: Annotated[int, typer.Option(min=1, help="Number of lines, from the end.")] = 200,
    state_dir: StateDir = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print more until Ctrl-C, also of the next head.")
    ] = False,
) -> None:
    """Print the end of the log of a session head on this machine.

    That of a run is the log of its model's head, and has lines of other runs too.
    """
    from tinkercloud_api.providers.local.head_folder import folder_of

    settings = read_settings(state_dir=state_dir)
    if settings.provider == "kubernetes":
        fail(f"heads are pods: use `kubectl --namespace {settings.namespace} logs POD`")
    model = name
    if ":train:" in name:
        run = with_catalog(state_dir, lambda catalog: catalog.run(name))
        if run is None:
            fail(f"run {name!r} does not exist; see `tinkercloud runs list`")
        model = run.base_model
    file = folder_of(settings.state_dir, model) / "head.log"
    if not file.is_file():
        fail(f"{file} does not exist: no head has served {model!r} from this state folder")
    typer.echo(f"log: {file}", err=True)
    try:
        _print_log(file, lines, follow=follow)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _print_log(file: Path, lines: int, *, follow: bool) -> None:
    """Print the end of a log.

    Args:
        file: its path.
        lines: number of lines, from the end.
        follow: whether to print what is added to it, and then to the logs that replace it.
    """
    with file.open("rb") as log:
        for line in deque(log, lines):
            typer.echo(line, nl=False)
        if follow:
            _print_added(file, log)
    while follow:
        with file.open("rb") as log:
            _print_added(file, log)


def _print_added(file: Path, log: IO[bytes]) -> None:
    """Print what is added to an open log, until another file replaces it."""
    is_replaced = False
    while not is_replaced:
        time.sleep(_FOLLOW_SECONDS)
        # Asked before it is read, which then is all of a log that was replaced.
        is_replaced = _is_replaced(file, log)
        if os.fstat(log.fileno()).st_size < log.tell():
            # logrotate has copied and truncated it.
            log.seek(0)
        typer.echo(log.read(), nl=False)


def _is_replaced(file: Path, log: IO[bytes]) -> bool:
    try:
        return not os.path.samestat(file.stat(), os.fstat(log.fileno()))
    except FileNotFoundError:
        return False
