"""Usage of a session's head reaches the catalog, through any replica, and exactly."""

import pytest

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.cluster.provider_world import World
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server

pytestmark = pytest.mark.slow

TOKENS_OF_A_STEP = 4


def trained_tokens(server: Server, model_id: str) -> int:
    rows = server.request("GET", "/api/v1/usage?by=model&limit=1000").json()["usage"]
    return sum(row["trained_tokens"] for row in rows if row["model_id"] == model_id)


def test_a_head_reports_to_all_replicas_that_use_it_and_at_last_when_it_stops(
    world: World, server: Server, other: Server
) -> None:
    head = world.a_head()
    training = world.a_training_client(server, head)
    step(training)
    assert other.result(f"{training.model_id}:1").status == 200
    wait_until(
        lambda: trained_tokens(server, training.model_id) == TOKENS_OF_A_STEP, "the first report"
    )

    step(training)
    head.stop()

    wait_until(
        lambda: trained_tokens(other, training.model_id) == 2 * TOKENS_OF_A_STEP, "the last report"
    )
