"""`tinkercloud plan`, as tests run it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from tinkercloud_api.cli import app

MODELS = Path(__file__).parents[3] / "unit" / "planning" / "public_models.json"
CONFIGS: dict[str, Any] = {
    name: model["config"] for name, model in json.loads(MODELS.read_text()).items()
}
"""The configurations of public models, by name."""
NO_HUB = "http://127.0.0.1:9"
"""An address at which nothing listens."""


def folder_with(config: object, folder: Path) -> str:
    """Write a configuration to a new folder and return its path."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def run(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", *arguments])


def run_with_hub(url: str, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a program, since the hub's address is read when it starts."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "tinkercloud_api", "plan", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def planned(*arguments: str) -> dict[str, Any]:
    """Return what the command prints with `--json`."""
    manifest: dict[str, Any] = json.loads(run(*arguments, "--json").output)
    return manifest
