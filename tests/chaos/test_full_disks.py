"""A disk that a head can't write to: training continues, visibly less safe, until it can."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tinker

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.storage.disks import full_disk

MODEL = "tiny/llama"

pytestmark = pytest.mark.timeout(300)


def a_training_client(server: Server) -> tinker.TrainingClient:
    return server.client().create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def durability(server: Server) -> str:
    return str(server.request("GET", "/api/v1/health").json()["durability"])


def finding(server: Server) -> tuple[str, str]:
    """Return the result and the words of the doctor, which fails if a check does."""
    output = subprocess.run(
        [sys.executable, "-m", "tinkercloud_api", "doctor", "--json"],
        env=server.environment(),
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    (found,) = [each for each in json.loads(output) if each["check"] == "durability"]
    return found["result"], found["detail"]


@pytest.mark.long
def test_training_continues_on_a_full_disk_and_is_durable_again_once_there_is_room(
    model_folder: Path, tmp_path: Path
) -> None:
    with a_server(tmp_path, {MODEL: model_folder}) as server:
        undisturbed = a_training_client(server)
        expected = [step(undisturbed) for _ in range(8)]
        training = a_training_client(server)
        losses = [step(training), step(training)]
        assert durability(server) == "local"
        assert finding(server) == ("ok", "level local (durability.level)")

        (head,) = server.head_pids()
        with full_disk(head):
            losses += [step(training), step(training), step(training)]
            assert durability(server) == "degraded"
            result, detail = finding(server)
            assert result == "FAILED"
            assert MODEL in detail

        wait_until(lambda: durability(server) == "local", "a journal")
        losses.append(step(training))
        server.kill_heads()
        losses += [step(training), step(training)]
        assert losses == expected
