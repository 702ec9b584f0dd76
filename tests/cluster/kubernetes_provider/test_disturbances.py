"""Heads are replaced and Kubernetes becomes unavailable: runs continue, or fail with the reason."""

import asyncio
import signal

import pytest
import tinker

from tinkercloud_crds.conditions import ConditionType, Reason
from tinkercloud_kube.client import Client, Page
from tinkercloud_kube.errors import Expired, Unavailable
from tinkercloud_testing.clients.sdk_steps import ADAM, a_datum, step
from tinkercloud_testing.cluster.kube_api.control_plane import ControlPlane
from tinkercloud_testing.cluster.provider_world import World, a_base_model, now
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_requests_within_a_minute_cause_at_most_one_write(world: World, server: Server) -> None:
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


def test_a_replaced_head_never_receives_requests_for_its_predecessor(
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


@pytest.mark.long
def test_a_session_suspended_because_idle_is_resumed_by_the_next_request(
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
    idle = (ConditionType.SUSPENDED, "True", Reason.IDLE, "no requests for 600 s")
    world.say(name, idle, (ConditionType.READY, "False", Reason.SUSPENDED, ""), endpoint=None)
    asleep = now()

    # Neither is a use of the run.
    assert server.request("GET", "/oai/sessions").json()["data"] == []
    assert server.post("cleanup_futures", {}).status == 200
    assert last_activity(world, name) <= asleep
    pending = training.forward_backward([a_datum()], "cross_entropy")
    wait_until(lambda: last_activity(world, name) > asleep, "the session to be wanted again")
    head.start()
    world.make_ready(name, head, incarnation="pod-b.0")
    training.optim_step(ADAM).result()
    losses += [pending.result().metrics["loss:sum"], step(training)]

    assert losses == expected


def last_activity(world: World, name: str) -> str:
    return str(world.session(name)["metadata"]["annotations"]["tinkercloud.dev/last-activity"])


def test_training_continues_while_kubernetes_is_unavailable(
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


async def listed(api: Client, kind: str) -> Page:
    """List what a control plane stores, once it has read that; before, it answers 429."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await api.list_all(kind)
            except Unavailable:
                await asyncio.sleep(0.1)


async def test_a_watch_from_an_old_resource_version_is_expired(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(world.kubeconfig))
    api = await Client.connect(world.namespace, "a test")
    await listed(api, "TrainingSession")

    with pytest.raises(Expired):
        _seen = [event async for event in api.watch("TrainingSession", 1, seconds=5)]

    await api.close()


async def test_a_silent_watch_is_considered_dead(
    world: World, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(world.kubeconfig))
    api = await Client.connect(world.namespace, "a test")
    listing = await listed(api, "BaseModel")
    process = control_plane.api_server.process
    assert process is not None
    events = api.watch("BaseModel", listing.version, seconds=2)
    world.cluster.apply(a_base_model("awaited", world.namespace, "tiny/awaited"))
    first = await anext(events)

    process.send_signal(signal.SIGSTOP)

    with pytest.raises(Unavailable):
        _more = [event async for event in events]
    process.send_signal(signal.SIGCONT)
    assert first.object["metadata"]["name"] == "awaited"
    await api.close()


@pytest.mark.long
def test_a_paused_server_notices_the_changes_it_missed(
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
