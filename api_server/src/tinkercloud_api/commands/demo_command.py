"""`tinkercloud demo`: starts the demo of the distribution `tinkercloud`, which uses the SDK."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tinkercloud_api.commands.common.local_catalog import StateDir
from tinkercloud_api.commands.common.shared import BaseUrl, fail, read_settings, server_url

_NEEDED = ("tinkercloud", "tinker", "matplotlib")
"""Modules that `tinkercloud[demo]` installs."""
_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def run_demo(
    model: Annotated[str, typer.Option(help="Served model to train.")] = _MODEL,
    plot: Annotated[Path, typer.Option(help="File of the plot.")] = Path("demo-results.png"),
    base_url: BaseUrl = None,
    state_dir: StateDir = None,
) -> None:
    """Train, sample and resume against a server, and plot the results; takes two minutes.

    Without TINKER_API_KEY, it creates a key in the catalog of this machine. It restarts the server
    in between if that uses the state folder.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        fail(
            f"demo: not installed: {', '.join(missing)}; install them with `pip install"
            " 'tinkercloud[demo]'`, or with `uv tool install 'tinkercloud[demo]'`"
        )
    folder = read_settings(state_dir=state_dir).state_dir.absolute()
    url = server_url(base_url, folder)
    typer.echo(
        f"Training {model} on {url}, which takes some minutes; importing the SDK first", err=True
    )
    # Tokenizers come from the server. The SDK reads the variables when it is imported.
    environment = {**os.environ, "TINKER_BASE_URL": url, "HF_ENDPOINT": f"{url}/hf"}
    options = ["--model", model, "--plot", str(plot), "--state-dir", str(folder)]
    command = [sys.executable, "-m", "tinkercloud.demo", *options]
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)  # noqa: S603
