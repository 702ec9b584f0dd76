"""A machine whose clock jumps, as with a wrong time server: training continues."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tinker

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.clocks import a_clock
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server, a_server

MODEL = "tiny/llama"

pytestmark = pytest.mark.timeout(300)


def a_training_client(server: Server) -> tinker.TrainingClient:
    return server.client().create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def heartbeats(server: Server) -> list[datetime]:
    """Return when the clients were last alive, by the clock of the server."""
    sessions = server.request("GET", "/api/v1/session_usage").json()["sessions"]
    return [datetime.fromisoformat(each["last_heartbeat_at"]) for each in sessions]


def has_jumped(server: Server, hours: int) -> bool:
    """Return whether the server has recorded heartbeats at its new time."""
    expected, tolerance = datetime.now(UTC) + timedelta(hours=hours), timedelta(minutes=30)
    return all(abs(each - expected) < tolerance for each in heartbeats(server))


@pytest.mark.long
def test_training_continues_while_the_clock_jumps_and_after_a_kill_then(
    model_folder: Path, tmp_path: Path
) -> None:
    clock = a_clock(tmp_path)
    with a_server(tmp_path / "state", {MODEL: model_folder}, clock.environment) as server:
        undisturbed = a_training_client(server)
        expected = [step(undisturbed) for _ in range(5)]
        training = a_training_client(server)
        losses = [step(training)]

        for hours in (100, -100):
            clock.jump(hours)
            wait_until(lambda hours=hours: has_jumped(server, hours), "heartbeats")  # type: ignore[misc]
            losses.append(step(training))

        server.kill_heads()
        losses.append(step(training))
        clock.jump(0)
        assert [*losses, step(training)] == expected
