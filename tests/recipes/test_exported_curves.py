"""`tinkercloud runs export` with the real MLflow and Weights & Biases.

Run by hand with `make test-recipes`: the packages are installed into a folder of their own.
"""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

MODEL = "tiny/llama"
UV = Path(__file__).parents[2] / ".uv" / "bin" / "uv"
READ_HISTORY = """
import json, sys
from wandb.proto import wandb_internal_pb2
record = wandb_internal_pb2.Record()
for line in sys.stdin:
    record.ParseFromString(bytes.fromhex(line))
    items = record.history.item
    if items:
        print(json.dumps({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items}))
"""
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with MLflow and W&B."""
    folder = tmp_path_factory.mktemp("trackers")
    install = [
        str(UV),
        "pip",
        "install",
        "--quiet",
        "--python",
        sys.executable,
        "--target",
        str(folder),
    ]
    subprocess.run([*install, "mlflow", "wandb"], check=True)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server with a tiny model."""
    folder = save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: folder}) as running:
        yield running


@pytest.fixture(scope="module")
def run(server: Server) -> str:
    """Return a run that has taken a step, and whose client has logged a metric of the same name."""
    training = server.client().create_lora_training_client(MODEL, rank=4, seed=1).result()
    add_step(server, training)
    server.post(f"runs/{training.model_id}/metrics", {"step": 1, "metrics": {"loss": 7.0}})
    return str(training.model_id)


def add_step(server: Server, training: Any) -> None:
    step(training)
    path = f"/api/v1/runs/{training.model_id}/curve"
    wait_until(lambda: server.request("GET", path).json()["points"], "a point of the curve")


def export(server: Server, packages: Path, run: str, *options: str) -> dict[str, Any]:
    variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY}
    command = [sys.executable, "-m", "tinkercloud_api", "runs", "export", run, "--json", *options]
    printed = subprocess.check_output(
        command, env={**os.environ, **variables, "PYTHONPATH": str(packages)}
    )
    return dict(json.loads(printed.splitlines()[-1]))


def records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file of W&B: chunks in blocks of 32 KiB, as in logs of LevelDB."""
    place, record = 7, b""
    while place + 7 <= len(content):
        if (1 << 15) - place % (1 << 15) < 7:
            place += (1 << 15) - place % (1 << 15)
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in {1, 4}:  # a whole record, or the last part of one
            yield record
            record = b""


def test_a_repeated_export_to_mlflow_replaces_the_first(
    server: Server, packages: Path, run: str, tmp_path: Path
) -> None:
    _, made = [
        export(server, packages, run, "--to", "mlflow", "--folder", str(tmp_path)) for _ in range(2)
    ]

    query = (
        "SELECT key, step FROM metrics JOIN runs USING (run_uuid) WHERE lifecycle_stage = 'active'"
    )
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as opened:
        metrics = sorted(opened.execute(query).fetchall())
    assert made["points"] == 2
    assert metrics == [
        (name, 1) for name in ("grad_norm", "learning_rate", "logged/loss", "loss", "tokens")
    ]


def test_a_repeated_export_to_wandb_replaces_the_first(
    server: Server, packages: Path, run: str, tmp_path: Path
) -> None:
    _, made = [
        export(server, packages, run, "--to", "wandb", "--folder", str(tmp_path)) for _ in range(2)
    ]

    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    lines = subprocess.run(
        [sys.executable, "-c", READ_HISTORY],
        env={**os.environ, "PYTHONPATH": str(packages)},
        input="\n".join(record.hex() for record in records(file.read_bytes())),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    curve, logged = [json.loads(line) for line in lines]
    assert Path(made["place"]) == file.parent
    assert (curve["step"], logged["step"], logged["logged/loss"]) == (1, 1, 7.0)
    assert {"loss", "grad_norm", "learning_rate", "tokens"} <= set(curve)
