"""Leader election: which replica may act, and what ends a term."""

import asyncio

import pytest
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from tinkercloud_kube.client import Client, ObjectRef
from tinkercloud_kube.errors import NotLeading
from tinkercloud_operator.run import leader
from tinkercloud_operator.run.leader import Leadership
from tinkercloud_operator.settings import Settings
from tinkercloud_testing.cluster.kube_api.memory_api import MOMENT, Connection, MemoryApi

NAME, NAMESPACE = "tinkercloud-operator", "default"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{NAME}"
SETTINGS = Settings(identity="me", lease_renew_seconds=10)
A_MOMENT = 0.05


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The current time: the last entry."""
    moments = [1000.0]
    monkeypatch.setattr(leader, "monotonic", lambda: moments[-1])
    return moments


@pytest.fixture
def leadership(connection: Connection) -> Leadership:
    """The leadership of a replica; nobody holds the Lease."""
    hold(connection.api, None)
    return Leadership(connection.client, SETTINGS)


def hold(api: MemoryApi, identity: str | None) -> None:
    times = {"renewTime": MOMENT, "acquireTime": MOMENT, "leaseDurationSeconds": 15}
    api.put(LEASE, {"kind": "Lease", "spec": {"holderIdentity": identity, **times}})


def holder(api: MemoryApi) -> str | None:
    found: str | None = api.objects[LEASE]["spec"].get("holderIdentity")
    return found


def lease_of(leadership: Leadership) -> LeaseLock:
    """Return the Lease as the election sees it."""
    return leadership._lock


async def renew(leadership: Leadership) -> bool:
    """Acquire or renew the Lease, as the election does."""
    await lease_of(leadership).get(NAME, NAMESPACE)
    now = "2026-01-01 12:00:00.0"
    to_annotation = LeaderElectionRecord("me", "15", now, now)
    return await lease_of(leadership).update(NAME, NAMESPACE, to_annotation)


def test_a_replica_that_never_held_the_lease_may_not_act(leadership: Leadership) -> None:
    assert not leadership.may_act()


async def test_a_paused_leader_may_not_act_until_it_renews_its_lease(
    leadership: Leadership, clock: list[float]
) -> None:
    await renew(leadership)
    clock.append(clock[0] + 9.9)
    assert leadership.may_act()

    clock.append(clock[0] + 10.0)
    assert not leadership.may_act()
    await renew(leadership)

    assert leadership.may_act()


async def test_a_lease_held_by_another_replica_ends_the_right_to_act(
    connection: Connection, leadership: Leadership
) -> None:
    await renew(leadership)

    hold(connection.api, "another")
    await lease_of(leadership).get(NAME, NAMESPACE)

    assert not leadership.may_act()


async def test_an_unreachable_lease_is_not_held(
    connection: Connection, leadership: Leadership, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lease_of(leadership).get(NAME, NAMESPACE)
    monkeypatch.setattr(lease_of(leadership), "_timeout_seconds", A_MOMENT)

    connection.api.is_silent = True

    assert (await lease_of(leadership).get(NAME, NAMESPACE))[0] is False
    assert not await renew(leadership)
    assert not leadership.may_act()


async def test_a_replica_that_does_not_lead_sends_no_requests(
    connection: Connection, leadership: Leadership
) -> None:
    cluster = Client(
        connection.client, NAMESPACE, manager="an operator", may_send=leadership.may_act
    )

    with pytest.raises(NotLeading, match="the Lease is not held"):
        await cluster.delete(ObjectRef("RayCluster", "one"), "uid-of-one")

    assert connection.api.requests == []


async def test_a_stopping_leader_releases_its_lease(
    connection: Connection, leadership: Leadership
) -> None:
    await renew(leadership)

    await leadership.resign()

    assert holder(connection.api) is None


async def test_the_lease_of_another_replica_is_not_released(
    connection: Connection, leadership: Leadership
) -> None:
    hold(connection.api, "another")

    await leadership.resign()

    assert holder(connection.api) == "another"
    assert connection.api.writes == []


async def test_a_stopping_leader_waits_for_the_end_of_its_term(
    leadership: Leadership,
) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def term() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(A_MOMENT)
            ended.set()

    leading = asyncio.create_task(leadership.run(term))
    await started.wait()
    leading.cancel()
    await asyncio.wait({leading})

    assert ended.is_set()
    assert not leadership.is_leader


async def test_a_failed_term_ends_leadership(leadership: Leadership) -> None:
    async def term() -> None:
        raise ValueError("no worker survives this")

    with pytest.raises(ValueError, match="no worker survives this"):
        await leadership.run(term)
