"""The worker of spares: what it writes, in which order, and what it completes after a failure."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_operator.run.cluster.head_calls import HeadClient
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.run.cluster.save_requests import HeadSaver
from tinkercloud_operator.run.pool.pool_memory import PoolMemory
from tinkercloud_operator.run.pool.pool_runner import Pools
from tinkercloud_operator.run.pool.spare_runner import Spares
from tinkercloud_testing.cluster.kube_api.memory_api import Connection, Json
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.resources.sessions import (
    MODEL_NAME,
    a_base_model_manifest,
    a_session_manifest,
)

OWN = "/apis/tinkercloud.dev/v1alpha1/namespaces/default"
SESSIONS = f"{OWN}/trainingsessions"
READY = {"type": "Ready", "status": "True", "reason": "Ready"}
QUEUED = {"type": "Ready", "status": "False", "reason": "Queued"}
ACCEPTED = {"type": "Accepted", "status": "True", "reason": "Accepted"}


class UnusedHeads(HeadClient):
    """Heads that receive no request: spares are given to sessions without them."""

    def __init__(self) -> None:
        pass


class Operator:
    """The worker of spares, with the objects that it knows."""

    def __init__(self, connection: Connection) -> None:
        self.api = connection.api
        self.watched = Watched()
        self.reconciled: list[str] = []
        self.spares = Spares(self.watched, connection.cluster, self._note, self.reconciled.append)
        heads = UnusedHeads()
        saver = HeadSaver(heads, self.reconciled.append)
        self.pools = Pools(
            self.watched,
            connection.cluster,
            saver,
            self._note,
            self.reconciled.append,
            spares=self.spares,
            memory=PoolMemory(heads),
        )

    def _note(self, kind: str, manifest: Any) -> None:
        self.watched.note(kind, manifest)
        self.pools.note(kind, manifest)

    def see(self, kind: str, manifest: Json, **status: Any) -> None:
        plural = {
            "BaseModel": "basemodels",
            "TrainingSession": "trainingsessions",
            "Tenant": "tenants",
        }[kind]
        path = f"{OWN}/{plural}/{manifest['metadata']['name']}"
        self._note(kind, self.api.put(path, manifest | {"status": status}))

    def see_spare(self) -> None:
        spare = a_session_manifest("spare-a", role="Spare", lora=None, owner=labels.POOL_OWNER)
        self.see("TrainingSession", spare, conditions=[READY, ACCEPTED])

    def see_session(self, name: str = "one", **spec: Any) -> None:
        session = a_session_manifest(name, modelId=f"{name}:train:0", **spec)
        self.see("TrainingSession", session)

    def promises(self, session: str) -> bool:
        self.spares.promise(session)
        return self.spares.is_promised(session)

    def known(self, name: str) -> Json:
        return dict(self.watched.sessions[name])

    @contextmanager
    def working(self) -> Iterator[None]:
        task = asyncio.create_task(self.pools.work())
        try:
            yield
        finally:
            task.cancel()

    def wrote(self, request: str) -> bool:
        return request in self.api.writes


@pytest.fixture
async def operator(connection: Connection) -> Operator:
    made = Operator(connection)
    made.see("BaseModel", a_base_model_manifest("model", warmSpares=1))
    return made


async def test_a_spare_is_started_before_any_session_exists(operator: Operator) -> None:
    with operator.working():
        await reached(lambda: len(operator.watched.sessions) > 0)

    [spare] = operator.watched.sessions.values()
    [owner] = spare["metadata"]["ownerReferences"]
    assert (spare["spec"]["role"], owner["kind"]) == ("Spare", "BaseModel")


async def test_a_spare_is_started_once_the_pods_of_sessions_are_scheduled(
    operator: Operator,
) -> None:
    session = a_session_manifest("one", modelId="one:train:0")
    starts = {"type": "Ready", "status": "False", "reason": "Provisioning"}
    operator.see("TrainingSession", session, conditions=[ACCEPTED, starts])

    with operator.working():
        await asyncio.sleep(0.1)
        assert not operator.wrote(f"POST {SESSIONS}")
        loads = {**starts, "reason": "HeadStarting"}
        operator.see("TrainingSession", session, conditions=[ACCEPTED, loads])
        await reached(lambda: operator.wrote(f"POST {SESSIONS}"))


async def test_the_spare_belongs_to_the_session_before_the_session_uses_it(
    operator: Operator,
) -> None:
    operator.see_spare()
    operator.see_session()
    assert operator.promises("one")

    with operator.working():
        await reached(lambda: operator.known("one")["spec"].get("poolCluster") == "spare-a")

    order = [operator.api.writes.index(f"PATCH {SESSIONS}/{each}") for each in ("spare-a", "one")]
    assert order == sorted(order)
    [owner] = operator.known("spare-a")["metadata"]["ownerReferences"]
    assert owner["uid"] == operator.known("one")["metadata"]["uid"]
    assert "one" in operator.reconciled
    assert not operator.promises("one")


async def test_the_quota_of_a_session_is_reserved_before_it_takes_over_a_spare(
    operator: Operator,
) -> None:
    limited = {"owners": ["ada"], "limits": {"sessions": 1}}
    tenant = {"metadata": {"name": "research"}, "spec": limited}
    operator.see("Tenant", {"apiVersion": labels.API_VERSION, "kind": "Tenant", **tenant})
    operator.api.refused["spare-a"] = 500
    operator.see_spare()
    operator.see_session("one")

    with operator.working():
        await reached(lambda: operator.wrote(f"PATCH {SESSIONS}/spare-a"))

    # All objects have the same age here, so the name decides which one comes first.
    operator.see_session("a")
    assert not operator.watched.may_start(operator.known("a"))
    assert operator.watched.may_start(operator.known("one"))


@pytest.mark.parametrize("status", [409, 500], ids=["conflict", "no answer"])
async def test_a_take_that_failed_after_its_first_write_is_completed_for_the_same_session(
    operator: Operator, status: int
) -> None:
    operator.api.refused["one"] = status
    operator.see_spare()
    operator.see_session()

    with operator.working():
        await reached(lambda: operator.wrote(f"PATCH {SESSIONS}/one"))
        operator.see_session("two")
        del operator.api.refused["one"]
        await reached(lambda: operator.known("one")["spec"].get("poolCluster") == "spare-a")

    assert "poolCluster" not in operator.known("two")["spec"]


async def test_a_spare_whose_takeover_is_rejected_holds_up_neither_spares_nor_sessions(
    operator: Operator,
) -> None:
    operator.see("BaseModel", a_base_model_manifest("model", warmSpares=2))
    operator.api.refused["spare-a"] = 403
    operator.see_spare()
    operator.see_session()
    assert operator.promises("one")

    with operator.working():
        await reached(lambda: operator.wrote(f"POST {SESSIONS}"))
        await reached(lambda: "one" in operator.reconciled)

    assert operator.wrote(f"PATCH {SESSIONS}/spare-a")
    assert not operator.promises("one")
    assert "poolCluster" not in operator.known("one")["spec"]


async def test_a_session_that_is_rejected_with_its_spare_starts_pods_of_its_own(
    operator: Operator,
) -> None:
    operator.api.refused["one"] = 422
    operator.see_spare()
    operator.see_session()
    assert operator.promises("one")

    with operator.working():
        await reached(lambda: "one" in operator.reconciled)
        # The spare is the session's already, so it serves no other one.
        await reached(lambda: operator.wrote(f"DELETE {SESSIONS}/spare-a"))

    assert operator.wrote(f"PATCH {SESSIONS}/one")
    assert not operator.promises("one")


async def test_what_was_rejected_is_looked_at_again_although_nothing_changes(
    operator: Operator,
) -> None:
    operator.api.refused["one"] = 422
    operator.see_spare()
    operator.see_session()

    with operator.working():
        await reached(lambda: operator.wrote(f"DELETE {SESSIONS}/spare-a"))

    assert await operator.spares.maintain(MODEL_NAME) is not None


async def test_a_session_that_a_spare_does_not_fit_is_promised_none(operator: Operator) -> None:
    operator.see_spare()
    operator.see_session("full", lora=None)
    operator.see_session("queued", queueName="research")

    assert not operator.promises("full")
    assert not operator.promises("queued")


async def test_a_waiting_session_of_another_base_model_ends_the_spare(operator: Operator) -> None:
    operator.see_spare()
    waiting = a_session_manifest("waiting", baseModel="other/model")
    operator.see("TrainingSession", waiting, conditions=[ACCEPTED, QUEUED])

    with operator.working():
        await reached(lambda: operator.wrote(f"DELETE {SESSIONS}/spare-a"))

    assert not operator.wrote(f"POST {SESSIONS}")
