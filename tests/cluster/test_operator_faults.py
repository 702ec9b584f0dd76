"""The operator killed, cut off, frozen and doubled: everything converges, nothing is lost."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from time import monotonic, sleep
from uuid import uuid4

import pytest

from tinkercloud_testing.cluster.client import Cluster
from tinkercloud_testing.cluster.control_plane import ControlPlane
from tinkercloud_testing.cluster.faulty_api import (
    Fault,
    FaultyApi,
    Trap,
    a_faulty_api,
    expired,
    refusing,
    slow,
)
from tinkercloud_testing.cluster.kuberay import KubeRay
from tinkercloud_testing.cluster.kwok import KwokNodes
from tinkercloud_testing.cluster.operators import (
    RunningOperator,
    install_definitions,
    make_operator,
    operator_account,
)
from tinkercloud_testing.cluster.programs import wait_until
from tinkercloud_testing.cluster.training_sessions import (
    CHILD_KINDS,
    SOON_SECONDS,
    Sessions,
    a_base_model,
    a_volume,
)

pytestmark = pytest.mark.timeout(300)

PATIENCE = {"last_checkpoint_seconds": 1, "drain_seconds": 1, "suspend_seconds": 1}
"""Played pods have no head that would answer: the operator is not to wait for one."""
IS_FULL = os.environ.get("TINKERCLOUD_TEST_FAULTS") == "full"
"""Whether everything is tried, or what a run of all tests has time for."""
MOMENTS = ("asked", "answered") if IS_FULL else ("answered",)
"""When the operator is killed: just before a write reaches the API server, or just after. Before
one write it leaves the cluster as after the write before."""
OUTAGE_SECONDS = 60 if IS_FULL else 20
FAULT_SECONDS = 8
"""Long enough for a few of the operator's tries."""
MOST_WRITES = 8
"""Of one step of an idle session; as many sessions are made, and grow idle, beforehand."""
IDLE_SECONDS = 60
"""The shortest time after which a session may be idle."""
RUNNING_CHILDREN = 10
"""RayCluster, head, two trainers, sampler; Service, Secret, ConfigMap, NetworkPolicy, budget."""
SUSPENDED_CHILDREN = RUNNING_CHILDREN - 5
"""Without the RayCluster and its pods."""


@dataclass(frozen=True)
class World:
    """A namespace with an operator whose way to the API server can be made to fail."""

    sessions: Sessions
    api: FaultyApi
    operator: RunningOperator


@pytest.fixture(scope="module")
def definitions(cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes) -> Cluster:
    install_definitions(cluster)
    kwok.add("faults-0", gpus=400)
    return cluster


@contextmanager
def a_world(cluster: Cluster, folder: Path, name: str, **settings: object) -> Iterator[World]:
    """Make a namespace, and an operator of it that has not been started."""
    with cluster.a_namespace(name) as namespace:
        cluster.apply(a_base_model(namespace), *a_volume(namespace))
        with a_faulty_api(operator_account(cluster, namespace, folder)) as api:
            operator = make_operator(api.kubeconfig, namespace, folder, **PATIENCE, **settings)
            try:
                yield World(Sessions(cluster, namespace), api, operator)
                operator.program.start()
                cluster.kubectl("delete", "tsess", "--all", "-n", namespace, "--timeout=90s")
            finally:
                operator.program.kill()
                sys.stdout.write(operator.program.last_words())


@pytest.fixture(scope="module")
def world(definitions: Cluster, cluster_folder: Path) -> Iterator[World]:
    with a_world(definitions, cluster_folder, "faults") as made:
        made.operator.program.start()
        # They grow idle while other tests run.
        kinds = product(("Suspend", "Delete"), MOMENTS, range(1, MOST_WRITES + 1))
        names = [made.sessions.make(idle_session(*kind)) for kind in kinds]
        for name in names:
            made.sessions.wait_for(name, "condition=Ready")
        yield made


def idle_session(action: str, moment: str, number: int) -> str:
    """Return the name of a session that is made to be culled."""
    return f"idle-{action.lower()}-{moment}-{number}"


@dataclass(frozen=True)
class Step:
    """One step of a session's life."""

    begin: Callable[[Sessions, str], object]
    goal: str
    """What `kubectl wait` waits for."""
    children: int
    """How many objects carry the session's label when it is done."""


def idle(action: str) -> Callable[[Sessions, str], object]:
    """Return what makes a session that was unused for a minute idle."""
    policy = {"timeoutSeconds": IDLE_SECONDS, "action": action}
    return lambda sessions, name: sessions.make(name, idle=policy)


STEPS = {
    "create": Step(Sessions.make, "condition=Ready", RUNNING_CHILDREN),
    "suspend": Step(
        lambda sessions, name: sessions.make(name, suspend=True),
        "condition=Suspended",
        SUSPENDED_CHILDREN,
    ),
    "resume": Step(
        lambda sessions, name: sessions.make(name, suspend=False),
        "condition=Ready",
        RUNNING_CHILDREN,
    ),
    "delete": Step(Sessions.delete, "delete", 0),
    "idle, to Suspend": Step(idle("Suspend"), "condition=Suspended", SUSPENDED_CHILDREN),
    "idle, to Delete": Step(idle("Delete"), "delete", 0),
}


def is_killed_by_write(world: World, name: str, step: Step, number: int, moment: str) -> bool:
    """Go a step with an operator that is killed at a write, then with the next; look at the end.

    Returns:
        Whether the step took that many writes, so that the operator was killed.
    """
    first = len(world.api.writes)
    trap = Trap(number, moment, world.operator.program.kill)
    world.api.trap = trap
    with ThreadPoolExecutor() as pool:
        step.begin(world.sessions, name)
        reached = pool.submit(world.sessions.wait_for, name, step.goal)
        wait_until(lambda: reached.done() or trap.has_sprung, step.goal, SOON_SECONDS)
        world.api.trap = None
        world.operator.program.start()
        reached.result()

    left = f"{step.children} children of {name}"
    wait_until(lambda: len(world.sessions.children(name)) == step.children, left, SOON_SECONDS)
    made = Counter(write.path for write in world.api.writes[first:] if write.status == 201)
    assert set(made.values()) <= {1}, f"made twice: {made}"
    return trap.has_sprung


@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("steps", [("create", "delete"), ("suspend", "resume")], ids="-".join)
def test_an_operator_killed_at_any_write_is_continued_by_the_next(
    world: World, steps: tuple[str, str], moment: str
) -> None:
    name = f"{steps[0]}-{moment}"
    if "create" not in steps:
        world.sessions.make_ready(name)

    most = 0
    for number in count(1):
        killed = [is_killed_by_write(world, name, STEPS[step], number, moment) for step in steps]
        if not any(killed):
            break
        most = number

    sys.stdout.write(f"{' and '.join(steps)}: killed at each of up to {most} writes\n")
    assert most > 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("action", ["Suspend", "Delete"])
def test_an_operator_killed_while_it_culls_is_continued_by_the_next(
    world: World, action: str, moment: str
) -> None:
    step = STEPS[f"idle, to {action}"]

    killed = [
        is_killed_by_write(world, idle_session(action, moment, number), step, number, moment)
        for number in range(1, MOST_WRITES + 1)
    ]

    sys.stdout.write(f"idle, to {action}: killed at each of {sum(killed)} writes\n")
    assert any(killed)
    assert not killed[-1], "all writes were tried"


def test_an_outage_restarts_nothing_and_tears_nothing_down(
    world: World, control_plane: ControlPlane
) -> None:
    world.sessions.make_ready("steady")
    before = identities(world.sessions, "steady")
    process = world.operator.program.process

    control_plane.api_server.kill()
    sleep(OUTAGE_SECONDS)
    assert world.operator.get("/livez") == "ok"
    control_plane.api_server.start()
    answered = monotonic()
    world.sessions.make("after-the-outage")
    namespace = world.sessions.namespace
    cluster = world.sessions.cluster
    cluster.wait_for("raycluster/after-the-outage", "create", namespace, SOON_SECONDS)
    sys.stdout.write(f"a RayCluster was made {monotonic() - answered:.1f} s after the outage\n")
    world.sessions.wait_for("after-the-outage", "condition=Ready")

    assert identities(world.sessions, "steady") == before
    assert world.sessions.status("steady")["phase"] == "Ready"
    assert world.operator.program.process is process
    assert world.operator.program.is_running


def test_a_restart_of_etcd_tears_nothing_down(world: World, control_plane: ControlPlane) -> None:
    world.sessions.make_ready("steady")
    before = identities(world.sessions, "steady")

    control_plane.etcd.restart()
    wait_until(world.sessions.cluster.is_healthy, "the API server is well", SOON_SECONDS)
    world.sessions.make_ready("after-etcd")

    assert identities(world.sessions, "steady") == before
    assert world.operator.program.is_running


def identities(sessions: Sessions, name: str) -> set[str]:
    """Return the uids of a session's children: others, if one was made anew."""
    selector = f"tinkercloud.dev/session={name}"
    children = sessions.cluster.objects(CHILD_KINDS, sessions.namespace, selector)
    return {child["metadata"]["uid"] for child in children}


@pytest.mark.parametrize(
    "fault",
    [refusing(429, Retry_After="1"), refusing(500), refusing(410), expired, slow(3.0)],
    ids=["throttled", "failing", "gone", "expired", "slow"],
)
def test_an_api_server_in_trouble_delays_and_breaks_nothing(world: World, fault: Fault) -> None:
    world.sessions.make_ready("steady")
    before = identities(world.sessions, "steady")
    name = f"made-{uuid4().hex[:6]}"

    with world.api.failing(fault):
        world.sessions.make(name)
        world.sessions.cluster.delete("service", "steady-head", world.sessions.namespace)
        sleep(FAULT_SECONDS)
    world.sessions.wait_for(name, "condition=Ready")

    service = "service/steady-head"
    world.sessions.cluster.wait_for(service, "create", world.sessions.namespace, SOON_SECONDS)
    assert len(identities(world.sessions, "steady") - before) == 1
    assert world.operator.program.is_running


def test_what_happened_while_no_watch_was_open_is_seen(world: World) -> None:
    world.sessions.make_ready("steady")

    world.api.cut_watches()
    world.sessions.cluster.delete("service", "steady-head", world.sessions.namespace)
    world.sessions.make_ready("made-meanwhile")

    service = "service/steady-head"
    world.sessions.cluster.wait_for(service, "create", world.sessions.namespace, SOON_SECONDS)


def test_what_no_watch_ever_tells_is_found_by_listing(
    definitions: Cluster, cluster_folder: Path
) -> None:
    with a_world(definitions, cluster_folder, "resync", resync_seconds=5) as world:
        world.operator.program.start()
        world.sessions.make_ready("steady")
        namespace = world.sessions.namespace

        with world.api.mute():
            definitions.kubectl("delete", "service", "steady-head", "-n", namespace)
            definitions.wait_for("service/steady-head", "create", namespace, SOON_SECONDS)


@dataclass(frozen=True)
class Replica:
    """One of two operators of a namespace, and its way to the API server."""

    api: FaultyApi
    operator: RunningOperator

    @property
    def leads(self) -> bool:
        """Whether it says so."""
        return self.operator.get("/readyz") == "leading"


@contextmanager
def two_replicas(
    cluster: Cluster, folder: Path, **settings: object
) -> Iterator[tuple[Sessions, Replica, Replica]]:
    """Run two operators of one namespace; the first leads."""
    with a_world(cluster, folder, "replicas", **settings) as world:
        first = Replica(world.api, world.operator)
        first.operator.program.start()
        wait_until(lambda: first.leads, "the first leads", SOON_SECONDS)
        with a_second_replica(world, folder, **settings) as second:
            world.sessions.make_ready("before")
            yield world.sessions, first, second


@contextmanager
def a_second_replica(world: World, folder: Path, **settings: object) -> Iterator[Replica]:
    """Run another operator of a world's namespace, which stands by."""
    namespace = world.sessions.namespace
    kubeconfig = operator_account(world.sessions.cluster, namespace, folder)
    with a_faulty_api(kubeconfig) as api:
        operator = make_operator(api.kubeconfig, namespace, folder, **PATIENCE, **settings)
        operator.program.start()
        try:
            yield Replica(api, operator)
        finally:
            operator.program.kill()
            sys.stdout.write(operator.program.last_words())


SHORT_LEASE = {"lease_seconds": 5, "lease_renew_seconds": 3, "lease_retry_seconds": 1}
ENDLESS_LEASE = {"lease_seconds": 3600, "lease_renew_seconds": 10, "lease_retry_seconds": 1}


def test_a_second_replica_takes_over_from_a_killed_leader(
    definitions: Cluster, cluster_folder: Path
) -> None:
    with two_replicas(definitions, cluster_folder, **SHORT_LEASE) as (sessions, first, second):
        assert not second.leads

        first.operator.program.kill()
        wait_until(lambda: second.leads, "the second leads", SOON_SECONDS)

        sessions.make_ready("after")


def test_a_leader_that_stops_hands_over_before_its_lease_ends(
    definitions: Cluster, cluster_folder: Path
) -> None:
    with two_replicas(definitions, cluster_folder, **ENDLESS_LEASE) as (sessions, first, second):
        first.operator.program.stop()
        wait_until(lambda: second.leads, "the second leads", SOON_SECONDS)

        sessions.make_ready("after")
        second.operator.program.stop()


def test_a_leader_frozen_past_its_lease_writes_nothing_when_it_thaws(
    definitions: Cluster, cluster_folder: Path
) -> None:
    with two_replicas(definitions, cluster_folder, **SHORT_LEASE) as (sessions, first, second):
        process = first.operator.program.process
        assert process is not None

        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: second.leads, "the second leads", SOON_SECONDS)
        sessions.cluster.delete("service", "before-head", sessions.namespace)
        sessions.make_ready("meanwhile")
        written = len(first.api.writes)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: not first.leads, "the first stands by", SOON_SECONDS)
        sessions.make_ready("after")

        assert first.api.writes[written:] == []
        assert second.leads
        assert first.operator.program.is_running
