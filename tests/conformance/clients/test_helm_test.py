"""The program that `helm test` runs, against a local server."""

import os
import subprocess
import sys
from pathlib import Path

from tinkercloud_testing.serving.servers import API_KEY, Server

SCRIPT = Path(__file__).parents[3] / "charts" / "tinkercloud" / "files" / "train_one_step.py"


def run(server: Server, model: str, key: str = API_KEY) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": key,
        "BASE_MODEL": model,
        "TIMEOUT_SECONDS": "60",
    }
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.read_text()],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_step_lowers_the_loss(server: Server) -> None:
    ended = run(server, model="tiny/llama")

    assert ended.returncode == 0, ended.stderr
    assert "loss: " in ended.stdout


def test_without_a_model_it_only_lists_the_served_models(server: Server) -> None:
    ended = run(server, model="")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "served: tiny/llama"


def test_it_fails_with_a_wrong_key(server: Server) -> None:
    assert run(server, model="", key="tml-unknown").returncode != 0
