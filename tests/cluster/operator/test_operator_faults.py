"""Outages, paused operators and replicas: everything converges, nothing is lost."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from uuid import uuid4

import pytest

from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.controllers.operators import (
    RunningOperator,
    install_definitions,
    make_operator,
    operator_account,
)
from tinkercloud_testing.cluster.controllers.training_sessions import (
    CHILD_KINDS,
    SOON_SECONDS,
    Sessions,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.control_plane import ControlPlane
from tinkercloud_testing.cluster.kube_api.faulty_api import (
    Fault,
    FaultyApi,
    a_faulty_api,
    expired,
    refusing,
    slow,
)
from tinkercloud_testing.cluster.kube_api.kwok import KwokNodes
from tinkercloud_testing.cluster.worlds import PATIENCE, World, a_world
from tinkercloud_testing.harness.waiting import wait_until

IS_FULL = os.environ.get("TINKERCLOUD_TEST_FAULTS") == "full"
"""Whether all faults are tested, instead of a selection."""
OUTAGE_SECONDS = 60 if IS_FULL else 20
FAULT_SECONDS = 8
"""Long enough for several retries of the operator."""


@pytest.fixture(scope="module")
def definitions(cluster: Cluster, kuberay: KubeRay, kwok: KwokNodes) -> Cluster:
    install_definitions(cluster)
    kwok.add("faults-0", gpus=400)
    return cluster


@pytest.fixture(scope="module")
def world(definitions: Cluster, cluster_folder: Path) -> Iterator[World]:
    with a_world(definitions, cluster_folder, "faults") as made:
        made.operator.program.start()
        yield made


def test_an_outage_restarts_nothing_and_deletes_nothing(
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


def test_a_restart_of_etcd_deletes_nothing(world: World, control_plane: ControlPlane) -> None:
    world.sessions.make_ready("steady")
    before = identities(world.sessions, "steady")

    control_plane.etcd.restart()
    wait_until(world.sessions.cluster.is_healthy, "the API server is well", SOON_SECONDS)
    world.sessions.make_ready("after-etcd")

    assert identities(world.sessions, "steady") == before
    assert world.operator.program.is_running


def identities(sessions: Sessions, name: str) -> set[str]:
    """Return the uids of the children of a session, which change if one is recreated."""
    selector = f"tinkercloud.dev/session={name}"
    children = sessions.cluster.objects(CHILD_KINDS, sessions.namespace, selector)
    return {child["metadata"]["uid"] for child in children}


@pytest.mark.parametrize(
    "fault",
    [refusing(429, Retry_After="1"), refusing(500), refusing(410), expired, slow(3.0)],
    ids=["throttled", "failing", "gone", "expired", "slow"],
)
def test_a_failing_api_server_only_causes_delays(world: World, fault: Fault) -> None:
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


def test_changes_made_while_no_watch_was_open_are_noticed(world: World) -> None:
    world.sessions.make_ready("steady")

    world.api.cut_watches()
    world.sessions.cluster.delete("service", "steady-head", world.sessions.namespace)
    world.sessions.make_ready("made-meanwhile")

    service = "service/steady-head"
    world.sessions.cluster.wait_for(service, "create", world.sessions.namespace, SOON_SECONDS)


def test_changes_that_no_watch_reports_are_found_by_listing(
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
    """One of two operators of a namespace, and its proxy to the API server."""

    api: FaultyApi
    operator: RunningOperator

    @property
    def leads(self) -> bool:
        """Whether it reports that it is the leader."""
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
    """Run another operator for the namespace of a world, on standby."""
    namespace = world.sessions.namespace
    kubeconfig = operator_account(world.sessions.cluster, namespace, folder)
    with a_faulty_api(kubeconfig) as api:
        operator = make_operator(api.kubeconfig, namespace, folder, **PATIENCE, **settings)
        operator.program.start()
        try:
            yield Replica(api, operator)
        finally:
            operator.program.kill()
            sys.stdout.write(operator.program.log_tail())


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


def test_a_stopping_leader_releases_its_lease(definitions: Cluster, cluster_folder: Path) -> None:
    with two_replicas(definitions, cluster_folder, **ENDLESS_LEASE) as (sessions, first, second):
        first.operator.program.stop()
        wait_until(lambda: second.leads, "the second leads", SOON_SECONDS)

        sessions.make_ready("after")
        second.operator.program.stop()


def test_a_leader_paused_beyond_its_lease_writes_nothing_when_it_continues(
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
