"""A run that has become less safe than promised is visible in Kubernetes and to its owner."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tinkercloud_crds import labels
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.cluster.provider_world import World
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server
from tinkercloud_testing.storage.disks import full_disk

pytestmark = pytest.mark.slow


def degraded(world: World, session: str) -> str | None:
    """Return the annotation that the operator shows as a condition."""
    found = world.session(session)["metadata"]["annotations"].get(labels.DEGRADED)
    return None if found is None else str(found)


@contextmanager
def running(replica: Server) -> Iterator[None]:
    replica.start()
    try:
        yield
    finally:
        replica.stop()


def health(server: Server) -> str:
    return str(server.request("GET", "/api/v1/health").json()["durability"])


def test_a_head_with_a_full_disk_is_reported_until_there_is_room(
    world: World, server: Server
) -> None:
    head, others = world.a_head(level="local"), world.sessions()
    training = world.a_training_client(server, head)
    session = world.new_session(others)
    step(training)

    with full_disk(head.pid):
        step(training)
        wait_until(lambda: degraded(world, session) is not None, "the annotation")
        reason = degraded(world, session)
        wait_until(lambda: health(server) == "degraded", "the API server's copy")

    assert reason is not None
    assert "the journal can't be written" in reason
    wait_until(lambda: degraded(world, session) is None, "a journal")
    wait_until(lambda: health(server) == "none", "the API server's copy")
    step(training)


def test_a_replica_that_was_away_when_the_disk_had_room_again_corrects_the_annotation(
    world: World,
) -> None:
    head, others, replica = world.a_head(level="local"), world.sessions(), world.server("three")
    with running(replica):
        training = world.a_training_client(replica, head)
        session = world.new_session(others)
        with full_disk(head.pid):
            step(training)
            wait_until(lambda: degraded(world, session) is not None, "the annotation")
            replica.stop()
    wait_until(lambda: head.durability() == "local", "a journal")
    assert degraded(world, session) is not None

    with running(replica):
        step(training)
        wait_until(lambda: degraded(world, session) is None, "the first report")
