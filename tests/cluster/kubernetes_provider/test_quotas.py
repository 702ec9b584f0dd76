"""Limits of tokens and storage that a Tenant sets: real API server and control plane, real head."""

from typing import Any

import pytest
import tinker

from tinkercloud_testing.clients.sdk_steps import a_datum, step
from tinkercloud_testing.cluster.provider_world import MODEL, World
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server

pytestmark = pytest.mark.slow


def a_tenant(world: World, name: str, **limits: int) -> dict[str, Any]:
    return {
        "apiVersion": "tinkercloud.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name, "namespace": world.namespace},
        "spec": {"owners": [f"{name}-*"], "limits": limits},
    }


def a_run(world: World, server: Server, key: str) -> tinker.TrainingClient:
    """Create a run at the shared head."""
    known = world.sessions()
    waiting = server.client(key).create_lora_training_client(MODEL, rank=4, seed=1)
    world.make_ready(world.new_session(known), world.head)
    return waiting.result()


def limits_of(server: Server, key: str) -> dict[str, int]:
    """Return the limits that a user is shown."""
    quota = server.request("GET", "/api/v1/usage", key=key).json()["quota"] or {"limits": []}
    return {each["name"]: each["limit"] for each in quota["limits"]}


@pytest.mark.long
def test_over_the_tokens_of_a_minute_requests_wait_until_the_tenant_may_use_more(
    world: World, server: Server
) -> None:
    key = server.new_key("slow-ada")
    world.cluster.apply(a_tenant(world, "slow", tokensPerMinute=100))
    wait_until(lambda: limits_of(server, key).get("tokensPerMinute") == 100, "the limit")
    training = a_run(world, server, key)

    training.forward_backward([a_datum()] * 1000, "cross_entropy").result()
    second = training.forward_backward([a_datum()], "cross_entropy")
    request = {"request_id": f"{training.model_id}:2"}

    def waiting() -> dict[str, Any]:
        return server.post("retrieve_future", request, key=key).json()

    wait_until(lambda: waiting().get("queue_state") == "paused_rate_limit", "the request to wait")
    assert "limits.tokensPerMinute of tenant 'slow' is 100" in waiting()["queue_state_reason"]
    step(a_run(world, server, server.new_key("quick")))
    assert waiting()["queue_state"] == "paused_rate_limit"
    world.cluster.apply(a_tenant(world, "slow", tokensPerMinute=10_000_000))
    second.result()


def test_over_the_storage_of_a_tenant_new_checkpoints_are_refused_and_training_continues(
    world: World, server: Server
) -> None:
    key = server.new_key("small-ada")
    world.cluster.apply(a_tenant(world, "small", storageBytes=1))
    wait_until(lambda: limits_of(server, key).get("storageBytes") == 1, "the limit")
    training = a_run(world, server, key)
    training.save_state("first").result()

    with pytest.raises(tinker.RequestFailedError, match=r"tenant 'small' use \d+ of 1 bytes"):
        training.save_state("second").result()

    assert step(training) > step(training)
    world.cluster.apply(a_tenant(world, "small", storageBytes=10**12))
    wait_until(lambda: limits_of(server, key).get("storageBytes") == 10**12, "the limit")
    training.save_state("second").result()
