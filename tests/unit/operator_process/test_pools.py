"""The worker of pools: what it writes, and which sessions it has reconciled."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.conditions import timestamp
from tinkercloud_operator.decide.pool import head_answers
from tinkercloud_operator.decide.pool.head_answers import HeadMemory
from tinkercloud_operator.decide.pool.pool_model import Cluster
from tinkercloud_operator.decide.pool.slots_plan import pool_status
from tinkercloud_operator.decide.session.actions import GiveAway, HeadRequest, TakeBack
from tinkercloud_operator.run.cluster.head_calls import HeadClient, SaveFailed, SaveResult
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.run.cluster.save_requests import HeadSaver
from tinkercloud_operator.run.pool import pool_memory, pool_runner
from tinkercloud_operator.run.pool.pool_memory import PoolMemory
from tinkercloud_operator.run.pool.pool_runner import Pools
from tinkercloud_operator.run.pool.spare_runner import Spares
from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_protocol.heads.launch import HeadStatus
from tinkercloud_testing.cluster.kube_api.memory_api import Connection, Json
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.resources.sessions import (
    MODEL_NAME,
    a_base_model_manifest,
    a_session_manifest,
)

OWN = "/apis/tinkercloud.dev/v1alpha1/namespaces/default"
ACCEPTED = {"type": "Accepted", "status": "True", "reason": "Accepted"}
READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Ready",
    "lastTransitionTime": "2026-01-01T12:00:00Z",
}


def a_head_status(capacity: HeadCapacity | None) -> HeadStatus:
    return HeadStatus(
        head="head",
        generation="0",
        model_name=MODEL_NAME,
        ready=True,
        models=["one:train:0"],
        samplers=0,
        pending_requests=0,
        idle_seconds=0.0,
        capacity=capacity,
    )


class StubHeads(HeadClient):
    """Heads that answer as a test says."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, HeadRequest]] = []
        self.results: asyncio.Queue[SaveResult | SaveFailed] = asyncio.Queue()
        self.most: dict[str, int] = {}
        """How many models each can hold, by the name of its session, with one that it has."""
        self.capacities: dict[str, HeadCapacity] = {}
        """What others say instead, by the name of their session."""
        self.is_silent = False
        self.answers: dict[str, asyncio.Event] = {}
        """When those answer that do not at once, by the name of their session."""
        self.asked: list[str] = []

    async def head_status(self, session: str, url: str) -> HeadStatus:
        self.asked.append(session)
        if session in self.answers:
            await self.answers[session].wait()
        if self.is_silent:
            raise TimeoutError
        if session in self.capacities:
            return a_head_status(self.capacities[session])
        more = self.most[session] - 1 if session in self.most else None
        return a_head_status(HeadCapacity(1, 100, 0, 0, more, held=("one:train:0",)))

    async def save(self, session: str, request: HeadRequest) -> SaveResult:
        self.requests.append((session, request))
        result = await self.results.get()
        if isinstance(result, SaveFailed):
            raise result
        return result


class PromptHeads(HeadClient):
    """Heads that give models away, and take them back, as soon as they are asked."""

    def __init__(self, *given_away: str) -> None:
        self.given_away = set(given_away)
        """Sessions."""

    async def head_status(self, session: str, url: str) -> HeadStatus:
        return a_head_status(None)

    async def save(self, session: str, request: HeadRequest) -> SaveResult:
        if isinstance(request, GiveAway):
            self.given_away.add(session)
        else:
            self.given_away.discard(session)
        return SaveResult(None)


class Operator:
    """The worker of pools, with the objects that it knows."""

    def __init__(self, connection: Connection, heads: HeadClient | None = None) -> None:
        self.api = connection.api
        self.watched = Watched()
        self.reconciled: list[str] = []
        self.heads = StubHeads()
        self.saver = HeadSaver(heads or self.heads, self._note_saved)
        self.spares = Spares(self.watched, connection.cluster, self.note, self.reconciled.append)
        self.pools = Pools(
            self.watched,
            connection.cluster,
            self.saver,
            self.note,
            self.reconciled.append,
            spares=self.spares,
            memory=PoolMemory(heads or self.heads),
        )

    def _note_saved(self, session: str) -> None:
        self.pools.note_saved(session)

    def note(self, kind: str, manifest: Any) -> None:
        self.watched.note(kind, manifest)
        self.pools.note(kind, manifest)

    def see(self, kind: str, manifest: Json, **status: Any) -> None:
        plural = {"BaseModel": "basemodels", "TrainingSession": "trainingsessions"}[kind]
        path = f"{OWN}/{plural}/{manifest['metadata']['name']}"
        self.note(kind, self.api.put(path, manifest | {"status": status}))

    def see_all(self) -> None:
        """See all objects, as an operator that has just started."""
        for manifest in list(self.api.objects.values()):
            self.note(manifest["kind"], manifest)

    def see_cluster(self, name: str = "pool-a", *, drain: str = "", **status: Any) -> None:
        cluster = a_session_manifest(name, role="Pool", lora=None)
        cluster["metadata"]["annotations"] = {labels.DRAIN: drain}
        self.see("TrainingSession", cluster, **{"conditions": [READY]} | status)

    def see_run(self, name: str = "one", cluster: str | None = None, **annotations: str) -> None:
        run = a_session_manifest(
            name, sharing="Shared", modelId=f"{name}:train:0", poolCluster=cluster
        )
        run["metadata"]["finalizers"] = [labels.FINALIZER]
        used = timestamp(datetime.now(UTC))
        run["metadata"]["annotations"] = {labels.LAST_ACTIVITY: used, **annotations}
        self.see("TrainingSession", run, conditions=[ACCEPTED])

    def see_change(self, name: str, *, status: Json | None = None, **metadata: Any) -> None:
        """See a session with another status or metadata."""
        path = f"{OWN}/trainingsessions/{name}"
        found = self.api.objects[path]
        changed = {"status": found["status"] | (status or {})}
        self.note("TrainingSession", self.api.put(path, changed, **metadata))

    def see_end(self, name: str) -> None:
        gone = self.api.objects.pop(f"{OWN}/trainingsessions/{name}")
        self.watched.note("TrainingSession", gone, is_gone=True)
        self.pools.note("TrainingSession", gone, is_gone=True)

    @contextmanager
    def working(self) -> Iterator[None]:
        tasks = [asyncio.create_task(each) for each in (self.pools.work(), self.saver.work())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    def wrote(self, request: str) -> bool:
        return request in self.api.writes


@pytest.fixture
async def operator(connection: Connection) -> Operator:
    made = Operator(connection)
    pool = {"minClusters": 0, "maxClusters": 1, "scaleDownAfterSeconds": 0}
    shared: Json = a_base_model_manifest("model", sharing="Shared", pool=pool)
    made.see("BaseModel", shared)
    return made


async def test_a_waiting_run_starts_a_cluster_that_its_base_model_owns(operator: Operator) -> None:
    operator.see_run()

    with operator.working():
        await reached(lambda: operator.wrote(f"POST {OWN}/trainingsessions"))
        await reached(lambda: len(operator.watched.sessions.values()) > 1)

    [made] = [each for each in operator.watched.sessions.values() if "Pool" in str(each["spec"])]
    [owner] = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("BaseModel", "model")
    assert made["spec"]["baseModel"] == MODEL_NAME
    assert "one" in operator.reconciled


@pytest.fixture
async def full(operator: Operator) -> Operator:
    """Return an operator of a pool with one slot, which a run has."""
    pool = {"maxClusters": 1, "slotsPerCluster": 1}
    shared: Json = a_base_model_manifest("model", sharing="Shared", pool=pool)
    operator.see("BaseModel", shared)
    operator.see_cluster()
    operator.see_run("one", cluster="pool-a")
    operator.see_run("two")
    return operator


def place_of(operator: Operator, name: str) -> str | None:
    place: str | None = operator.watched.sessions[name]["spec"].get("poolCluster")
    return place


async def test_a_run_that_waits_gets_the_slot_of_one_that_has_finished(full: Operator) -> None:
    with full.working():
        await reached(lambda: "all 1 slots" in (full.pools.waiting_message("two") or ""))
        full.see_change("one", status={"finishedTime": "2026-01-01T13:00:00Z"})
        await reached(lambda: place_of(full, "two") == "pool-a")

    assert full.pools.waiting_message("two") is None
    assert "two" in full.reconciled


async def test_a_run_of_a_deleted_cluster_gets_a_place_when_its_head_has_ended(
    operator: Operator,
) -> None:
    head: Json = {
        "metadata": {
            "name": "pool-a-head",
            "uid": "uid-of-head",
            "resourceVersion": "1",
            "labels": {labels.SESSION_LABEL: "pool-a", labels.COMPONENT_LABEL: "head"},
            "ownerReferences": [{"kind": "RayCluster", "name": "pool-a", "uid": "uid-of-cluster"}],
        },
        "spec": {},
        "status": {"containerStatuses": [{"name": "head", "started": True, "ready": False}]},
    }
    operator.watched.note("Pod", head)
    operator.see_cluster("pool-b")
    operator.see_run("one", cluster="pool-a")

    with operator.working():
        await reached(lambda: "still running" in (operator.pools.waiting_message("one") or ""))
        waited_at = place_of(operator, "one")
        gone = head | {"metadata": head["metadata"] | {"resourceVersion": "2"}}
        operator.watched.note("Pod", gone, is_gone=True)
        operator.pools.note("Pod", gone, is_gone=True)
        await reached(lambda: place_of(operator, "one") == "pool-b")

    assert waited_at == "pool-a"
    assert operator.pools.waiting_message("one") is None


async def test_a_head_whose_memory_is_full_gets_no_run_although_its_cluster_has_slots(
    operator: Operator,
) -> None:
    pool = {"maxClusters": 1, "slotsPerCluster": 8}
    shared: Json = a_base_model_manifest("model", sharing="Shared", pool=pool)
    operator.see("BaseModel", shared)
    operator.heads.most["pool-a"] = 1
    operator.see_cluster(endpoint="http://head", incarnation="i1")
    operator.see_run("one", cluster="pool-a")
    operator.see_run("two")

    with operator.working():
        await reached(lambda: "room for fewer" in (operator.pools.waiting_message("two") or ""))
        status = pool_status(operator.pools.facts(MODEL_NAME))
        assert status is not None
        assert status.slot_summary == "1/1"
        operator.see_end("one")
        await reached(lambda: place_of(operator, "two") == "pool-a")


async def test_a_run_that_the_memory_has_no_room_for_is_placed_when_it_has_some(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_runner, "ASK_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(head_answers, "ASK_AGAIN_SECONDS", 0.0)
    pool = {"maxClusters": 1, "slotsPerCluster": 8}
    shared: Json = a_base_model_manifest("model", sharing="Shared", pool=pool)
    operator.see("BaseModel", shared)
    # Models as small as the one that is there would fill all slots.
    full = HeadCapacity(1, 100, 0, 700, 7, held=("one:train:0",), rank_bytes=100)
    operator.heads.capacities["pool-a"] = full
    operator.see_cluster(endpoint="http://head", incarnation="i1")
    operator.see_run("one", cluster="pool-a")
    operator.see_run("two")

    with operator.working():
        await reached(lambda: "has no room" in (operator.pools.waiting_message("two") or ""))
        operator.heads.capacities["pool-a"] = replace(full, free_bytes=100_000)
        await reached(lambda: place_of(operator, "two") == "pool-a")


async def test_a_placed_run_that_its_head_has_no_room_for_waits_until_it_has(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_runner, "ASK_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(head_answers, "ASK_AGAIN_SECONDS", 0.0)
    full = HeadCapacity(1, 800, 0, 700, 0, held=("one:train:0",), rank_bytes=100)
    operator.heads.capacities["pool-a"] = full
    operator.see_cluster(endpoint="http://head", incarnation="i1")
    operator.see_run("one", cluster="pool-a")
    operator.see_run("two", cluster="pool-a")

    with operator.working():
        await reached(lambda: "has no room" in (operator.pools.waiting_message("two") or ""))
        assert operator.pools.waiting_message("one") is None
        operator.heads.capacities["pool-a"] = replace(full, free_bytes=100_000)
        await reached(lambda: operator.pools.waiting_message("two") is None)

    assert place_of(operator, "two") == "pool-a"
    assert operator.reconciled.count("two") >= 2


def a_head(name: str = "a") -> Cluster:
    unused_since = datetime(2026, 1, 1, tzinfo=UTC)
    return Cluster(name, True, False, unused_since, endpoint="http://head", incarnation="i1")


async def test_what_a_head_has_measured_counts_while_it_does_not_answer(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_answers, "ASK_AGAIN_SECONDS", 0.0)
    memory = PoolMemory(operator.heads)
    operator.heads.most["a"] = 1
    await memory.ask([a_head()], lambda: None)

    operator.heads.is_silent = True
    await memory.ask([a_head()], lambda: None)

    assert operator.heads.asked == ["a", "a"]
    assert memory.known == {"i1": HeadMemory(1, held=("one:train:0",))}


async def test_nobody_waits_for_a_head_that_did_not_answer_last_time(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_answers, "ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(pool_memory, "_WAIT_SECONDS", math.inf)
    memory, heads = PoolMemory(operator.heads), operator.heads
    heads.is_silent = True
    await memory.ask([a_head()], lambda: None)
    heads.is_silent, heads.most["a"] = False, 2
    answers = heads.answers["a"] = asyncio.Event()
    changed = asyncio.Event()

    await memory.ask([a_head()], changed.set)

    assert memory.known == {}
    answers.set()
    await changed.wait()
    assert memory.known == {"i1": HeadMemory(2, held=("one:train:0",))}


async def test_a_head_that_hangs_delays_only_the_first_plan(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_memory, "_WAIT_SECONDS", 0.01)
    memory = PoolMemory(operator.heads)
    operator.heads.answers["a"] = asyncio.Event()
    await memory.ask([a_head()], lambda: None)

    monkeypatch.setattr(pool_memory, "_WAIT_SECONDS", math.inf)
    await memory.ask([a_head()], lambda: None)

    assert operator.heads.asked == ["a"]
    memory.close()


async def test_an_answer_in_time_has_the_pool_planned_once(operator: Operator) -> None:
    operator.heads.most["a"] = 2
    memory, changes = PoolMemory(operator.heads), list[str]()

    await memory.ask([a_head()], lambda: changes.append("changed"))
    await asyncio.sleep(0)

    assert memory.known == {"i1": HeadMemory(2, held=("one:train:0",))}
    assert changes == []


async def test_a_head_that_hangs_delays_no_run_of_another_pool(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_memory, "_WAIT_SECONDS", 0.01)
    operator.heads.answers["pool-a"] = asyncio.Event()
    other = a_base_model_manifest("other", sharing="Shared", modelName="Other/Model")
    operator.see("BaseModel", other)
    operator.see_cluster(endpoint="http://head", incarnation="i1")
    operator.see_run("one")
    here = a_session_manifest("pool-b", role="Pool", lora=None, baseModel="Other/Model")
    operator.see("TrainingSession", here, conditions=[READY])
    run = a_session_manifest(
        "two", sharing="Shared", modelId="two:train:0", baseModel="Other/Model"
    )
    run["metadata"]["finalizers"] = [labels.FINALIZER]
    operator.see("TrainingSession", run, conditions=[ACCEPTED])

    with operator.working():
        await reached(lambda: place_of(operator, "two") == "pool-b")
        assert operator.heads.asked == ["pool-a"]


async def test_a_late_answer_of_a_head_gives_a_run_that_waits_its_place(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_memory, "_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(head_answers, "ASK_AGAIN_SECONDS", 0.0)
    operator.heads.most["pool-a"] = 1
    operator.see_cluster(endpoint="http://head", incarnation="i1")
    operator.see_run("one", cluster="pool-a")
    operator.see_run("two")

    with operator.working():
        await reached(lambda: "room for fewer" in (operator.pools.waiting_message("two") or ""))
        answers = operator.heads.answers["pool-a"] = asyncio.Event()
        operator.see_change("two")
        await reached(lambda: len(operator.heads.asked) > 1)
        operator.heads.most["pool-a"] = 2
        answers.set()
        await reached(lambda: place_of(operator, "two") == "pool-a")


async def test_what_a_head_has_measured_does_not_count_for_the_next_one(
    operator: Operator,
) -> None:
    operator.heads.most["pool-a"] = 1
    operator.see_cluster(endpoint="http://head", incarnation="i1")
    operator.see_run("one", cluster="pool-a")
    operator.see_run("two")

    with operator.working():
        await reached(lambda: "room for fewer" in (operator.pools.waiting_message("two") or ""))
        operator.heads.most.clear()
        operator.see_change("pool-a", status={"incarnation": "i2"})
        await reached(lambda: place_of(operator, "two") == "pool-a")


async def test_a_run_that_waits_gets_the_slot_of_a_deleted_one_once_its_head_has_dropped_that(
    full: Operator,
) -> None:
    with full.working():
        await reached(lambda: full.pools.waiting_message("two") is not None)
        full.see_change("one", deletionTimestamp="2026-01-01T13:00:00Z")
        # Another run that waits shows that the worker has seen the deletion.
        full.see_run("two-later")
        await reached(lambda: full.pools.waiting_message("two-later") is not None)
        assert place_of(full, "two") is None
        full.see_end("one")
        await reached(lambda: place_of(full, "two") == "pool-a")


async def test_no_run_gets_a_place_on_a_cluster_whose_deletion_is_not_visible_yet(
    operator: Operator,
) -> None:
    operator.see_cluster()

    with operator.working():
        await reached(lambda: operator.wrote(f"DELETE {OWN}/trainingsessions/pool-a"))
        operator.see_run()
        await reached(lambda: operator.pools.waiting_message("one") is not None)

    assert not operator.wrote(f"PATCH {OWN}/trainingsessions/one")


async def test_a_refused_deletion_leaves_the_cluster_in_use(operator: Operator) -> None:
    operator.api.refused["pool-a"] = 500
    operator.see_cluster()

    with operator.working():
        await reached(lambda: operator.wrote(f"DELETE {OWN}/trainingsessions/pool-a"))
        operator.see_run()
        await reached(lambda: operator.wrote(f"PATCH {OWN}/trainingsessions/one"))


async def test_a_run_whose_place_is_refused_does_not_delay_the_others(operator: Operator) -> None:
    operator.api.refused["one"] = 403
    operator.see_cluster()
    operator.see_run("one")
    operator.see_run("two")

    with operator.working():
        await reached(lambda: operator.wrote(f"PATCH {OWN}/trainingsessions/two"))


async def test_a_run_that_was_changed_meanwhile_gets_its_place_once_that_is_seen(
    operator: Operator,
) -> None:
    path = f"{OWN}/trainingsessions/one"
    operator.see_cluster()
    operator.see_run()
    seen = operator.watched.sessions["one"]
    changed = operator.api.put(path, {"spec": seen["spec"] | {"poolCluster": "pool-b"}})

    with operator.working():
        await reached(lambda: operator.wrote(f"PATCH {path}"))
        assert operator.api.objects[path] == changed
        operator.note("TrainingSession", operator.api.put(path, {"spec": seen["spec"]}))
        await reached(lambda: operator.api.objects[path]["spec"].get("poolCluster") == "pool-a")


async def test_runs_are_reconciled_when_their_cluster_changes_but_not_when_it_is_used(
    operator: Operator,
) -> None:
    operator.see_cluster(incarnation="head-0")
    operator.see_run(cluster="pool-a")
    operator.reconciled.clear()

    operator.see_cluster(incarnation="head-0", lastActivityTime="2026-01-01T13:00:00Z")
    assert operator.reconciled == []
    operator.see_cluster(incarnation="head-1")

    assert operator.reconciled == ["one"]


def see_a_drained_cluster(operator: Operator) -> None:
    """Let the worker see a run on a cluster that is drained, and another cluster."""
    heads = {"endpoint": "http://pool-a", "incarnation": "head-a"}
    operator.see_cluster("pool-a", drain="true", **heads)
    operator.see_cluster("pool-b", endpoint="http://pool-b", incarnation="head-b")
    operator.see_run(cluster="pool-a")


def placed(operator: Operator) -> tuple[str, str | None]:
    """Return the cluster of the run, and the one that it is moved to."""
    run = operator.api.objects[f"{OWN}/trainingsessions/one"]
    return run["spec"]["poolCluster"], run["metadata"].get("annotations", {}).get(labels.MOVING_TO)


async def test_a_run_is_placed_on_another_cluster_only_after_its_head_has_given_it_away(
    operator: Operator,
) -> None:
    see_a_drained_cluster(operator)

    with operator.working():
        await reached(lambda: bool(operator.heads.requests))
        assert placed(operator) == ("pool-a", "pool-b")
        operator.heads.results.put_nowait(SaveResult(None))
        await reached(lambda: placed(operator) == ("pool-b", None))

    [(session, request)] = operator.heads.requests
    assert session == "one"
    assert isinstance(request, GiveAway)
    assert (request.cluster, request.incarnation) == ("pool-a", "head-a")


async def test_a_new_operator_asks_the_head_again_and_ends_the_move(operator: Operator) -> None:
    see_a_drained_cluster(operator)
    operator.see_cluster("pool-a", endpoint="http://pool-a", incarnation="head-a")
    operator.see_run(cluster="pool-a", **{labels.MOVING_TO: "pool-b"})
    operator.heads.results.put_nowait(SaveResult(None))

    with operator.working():
        await reached(lambda: placed(operator) == ("pool-b", None))

    assert len(operator.heads.requests) == 1


async def test_a_run_whose_target_is_lost_returns_once_its_head_has_taken_it_back(
    operator: Operator,
) -> None:
    see_a_drained_cluster(operator)

    with operator.working():
        await reached(lambda: bool(operator.heads.requests))
        operator.see_cluster("pool-b", drain="true")
        await reached(lambda: placed(operator) == ("pool-a", "pool-a"))
        # The head may still give it away: it is asked to take it back after that.
        assert len(operator.heads.requests) == 1
        operator.heads.results.put_nowait(SaveResult(None))
        await reached(lambda: len(operator.heads.requests) == 2)
        assert placed(operator) == ("pool-a", "pool-a")
        operator.heads.results.put_nowait(SaveResult(None))
        await reached(lambda: placed(operator) == ("pool-a", None))

    [(_, given), (_, taken)] = operator.heads.requests
    assert isinstance(given, GiveAway)
    assert isinstance(taken, TakeBack)
    assert (taken.cluster, taken.incarnation, taken.model_id) == ("pool-a", "head-a", "one:train:0")


async def test_a_new_operator_asks_the_head_again_to_take_a_run_back(operator: Operator) -> None:
    operator.see_cluster("pool-a", endpoint="http://pool-a", incarnation="head-a")
    operator.see_run(cluster="pool-a", **{labels.MOVING_TO: "pool-a"})
    operator.heads.results.put_nowait(SaveResult(None))

    with operator.working():
        await reached(lambda: placed(operator) == ("pool-a", None))

    assert [type(request) for _, request in operator.heads.requests] == [TakeBack]


async def test_a_run_stays_if_its_head_answers_that_it_cannot_give_it_away_now(
    operator: Operator,
) -> None:
    see_a_drained_cluster(operator)
    operator.heads.results.put_nowait(SaveFailed("the store is full", is_refused=True))

    with operator.working():
        await reached(lambda: bool(operator.heads.requests))
        await reached(lambda: placed(operator) == ("pool-a", None))

    assert len(operator.heads.requests) == 1
    assert "the store is full" in (operator.pools.move_failure("one") or "")
    assert "one" in operator.reconciled


async def test_a_run_whose_head_did_not_answer_may_have_been_given_away(
    operator: Operator,
) -> None:
    see_a_drained_cluster(operator)
    operator.heads.results.put_nowait(SaveFailed("no answer"))

    with operator.working():
        await reached(lambda: bool(operator.saver.failed("one")))
        # The worker has finished with the pool again once it places the second one.
        operator.see_run("two")
        await reached(lambda: place_of(operator, "two") is not None)
        operator.see_run("three")
        await reached(lambda: place_of(operator, "three") is not None)

    assert placed(operator) == ("pool-a", "pool-b")


@pytest.mark.parametrize("writes", range(4))
@pytest.mark.parametrize(
    ("moving_to", "drained", "place"),
    [(None, "pool-a", "pool-b"), ("pool-b", "pool-b", "pool-a")],
    ids=["moves", "returns"],
)
async def test_a_run_moves_or_returns_also_if_the_operator_is_killed_at_any_write(
    connection: Connection, moving_to: str | None, drained: str, place: str, writes: int
) -> None:
    heads = PromptHeads(*(["one"] if moving_to is not None else []))
    first, second = Operator(connection, heads), Operator(connection, heads)
    shared: Json = a_base_model_manifest("model", sharing="Shared", pool={"maxClusters": 2})
    first.see("BaseModel", shared)
    for name in ("pool-a", "pool-b"):
        drain = "true" if name == drained else ""
        first.see_cluster(name, drain=drain, endpoint=f"http://{name}", incarnation=name)
    annotations = {} if moving_to is None else {labels.MOVING_TO: moving_to}
    first.see_run(cluster="pool-a", **annotations)

    def is_over() -> bool:
        has_ended = f"{OWN}/trainingsessions/{drained}" not in first.api.objects
        return has_ended and placed(first) == (place, None)

    first.api.executed_writes = writes
    with first.working():
        await reached(lambda: is_over() or len(first.api.writes) > writes)
    assert is_over() == (writes == 3), "there are three writes"
    first.api.executed_writes = math.inf
    second.see_all()
    with second.working():
        await reached(is_over)

    assert heads.given_away == ({"one"} if place == "pool-b" else set())
    posted = [each for each in first.api.writes if each.startswith("POST")]
    assert posted == []
