"""Heads that go and come, and a Kubernetes that is away: runs go on, or are told."""

import asyncio
import signal

import pytest
import tinker

from tinkercloud_api.providers.cluster_api import (
    ClusterApi,
    ClusterUnreachable,
    Listing,
    ResourceVersionGone,
)
from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_testing.cluster.control_plane import ControlPlane
from tinkercloud_testing.cluster.provider_world import World, a_base_model, now
from tinkercloud_testing.sdk_steps import ADAM, a_datum, step
from tinkercloud_testing.servers import API_KEY, Server
from tinkercloud_testing.waiting import wait_until

pytestmark = pytest.mark.slow


def test_requests_of_a_minute_are_one_write_at_most(world: World, server: Server) -> None:
    training = world.a_training_client(server)
    step(training)
    name = next(
        session["metadata"]["name"]
        for session in world.cluster.objects("trainingsessions", world.namespace)
        if session["spec"].get("modelId") == training.model_id
    )
    before = world.session(name)["metadata"]["resourceVersion"]

    for _ in range(10):
        step(training)

    assert world.session(name)["metadata"]["resourceVersion"] == before


def test_a_head_that_was_replaced_unnoticed_never_gets_its_predecessors_requests(
    world: World, server: Server
) -> None:
    head = world.a_head()
    training = world.a_training_client(server, head)
    step(training)
    saved = training.save_state("first").result().path

    head.kill()
    head.start()

    with pytest.raises((tinker.TinkerError, ValueError), match="session head stopped") as caught:
        step(training)
    assert saved in str(caught.value)


def test_a_session_suspended_for_idleness_is_resumed_by_the_next_request(
    world: World, server: Server
) -> None:
    reference = world.a_training_client(server)
    expected = [step(reference) for _ in range(4)]
    known = world.sessions()
    head = world.a_head()
    training = world.a_training_client(server, head)
    [name] = set(world.sessions()) - set(known)
    losses = [step(training), step(training)]
    head.stop()
    idle = (ConditionType.SUSPENDED, "True", Reason.IDLE, "unused for 600 s")
    world.say(name, idle, (ConditionType.READY, "False", Reason.SUSPENDED, ""), endpoint=None)
    asleep = now()

    going_on = training.forward_backward([a_datum()], "cross_entropy")
    wait_until(lambda: last_activity(world, name) > asleep, "the session to be wanted again")
    head.start()
    world.make_ready(name, head, incarnation="pod-b.0")
    training.optim_step(ADAM).result()
    losses += [going_on.result().metrics["loss:sum"], step(training)]

    assert losses == expected


def last_activity(world: World, name: str) -> str:
    return str(world.session(name)["metadata"]["annotations"]["tinkercloud.dev/last-activity"])


def test_training_goes_on_while_kubernetes_is_away(
    world: World, server: Server, control_plane: ControlPlane
) -> None:
    training = world.a_training_client(server)
    step(training)

    control_plane.api_server.kill()
    loss = step(training)
    control_plane.api_server.start()

    assert loss > 0
    assert server.process is not None
    assert server.process.poll() is None
    assert step(world.a_training_client(server)) > 0


async def begun(api: ClusterApi, plural: str) -> Listing:
    """List what a control plane stores, once it has read that; before, it answers 429."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await api.list_all(plural)
            except ClusterUnreachable:
                await asyncio.sleep(0.1)


async def test_a_watch_from_too_long_ago_is_told_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(world.kubeconfig))
    api = await ClusterApi.connect(world.namespace)
    await begun(api, "trainingsessions")

    with pytest.raises(ResourceVersionGone):
        _seen = [event async for event in api.watch("trainingsessions", "1", seconds=5)]

    await api.close()


async def test_a_watch_that_falls_silent_is_taken_for_dead(
    world: World, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(world.kubeconfig))
    api = await ClusterApi.connect(world.namespace)
    listing = await begun(api, "basemodels")
    process = control_plane.api_server.process
    assert process is not None
    events = api.watch("basemodels", listing.resource_version, seconds=2)
    world.cluster.apply(a_base_model("awaited", world.namespace, "tiny/awaited"))
    first = await anext(events)

    process.send_signal(signal.SIGSTOP)

    with pytest.raises(ClusterUnreachable):
        _more = [event async for event in events]
    process.send_signal(signal.SIGCONT)
    assert first.object["metadata"]["name"] == "awaited"
    await api.close()


def test_a_server_that_slept_through_changes_learns_of_them(
    world: World, server: Server, control_plane: ControlPlane
) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    world.cluster.apply(a_base_model("late", world.namespace, "tiny/late"))
    control_plane.api_server.restart()

    server.process.send_signal(signal.SIGCONT)

    def offered() -> bool:
        listed = server.request("GET", "/api/v1/get_server_capabilities", key=API_KEY)
        return b"tiny/late" in listed.body

    wait_until(offered, "the new base model")
