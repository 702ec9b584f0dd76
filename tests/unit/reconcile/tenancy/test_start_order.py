"""Sessions that compete for GPUs get their pods one after the other, and owners take turns."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkercloud_crds.conditions import ConditionType
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.decide.tenancy.device_claims import claim, compete
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_testing.resources.session_world import SETTINGS, a_world
from tinkercloud_testing.resources.sessions import (
    ENGINES,
    MODEL_NAME,
    TRAINERS,
    Json,
    a_base_model,
    a_base_model_manifest,
    a_session,
    a_session_manifest,
    snapshot,
)

HALF: Json = {"trainer": TRAINERS, "sampler": ENGINES}
OTHER = "Qwen/Qwen3-32B"


def conditions(**statuses: str) -> Json:
    return {"conditions": [{"type": kind, "status": said} for kind, said in statuses.items()]}


def stored(manifest: Json, second: int, **others: Any) -> Json:
    metadata = {
        **manifest["metadata"],
        "uid": f"uid-{manifest['metadata']['name']}",
        "resourceVersion": "1",
        "creationTimestamp": f"2026-01-01T12:00:{second:02}Z",
    }
    return {**manifest, "metadata": metadata, **others}


class Queue:
    """Sessions in the operator's cache."""

    def __init__(self, **offer: Any) -> None:
        self.watched = Watched()
        self._version = 1
        self._made: dict[str, Json] = {}
        self.note("BaseModel", stored(a_base_model_manifest("model", **offer), 0))

    def note(self, kind: str, manifest: Json) -> set[str]:
        self._version += 1
        manifest["metadata"]["resourceVersion"] = str(self._version)
        return self.watched.note(kind, manifest)

    def make(self, name: str, second: int = 0, status: Json | None = None, **spec: Any) -> set[str]:
        manifest = stored(a_session_manifest(name, **spec), second, status=status or {})
        self._made[name] = manifest
        return self.note("TrainingSession", manifest)

    def _owner_of(self, name: str) -> Json:
        return {"kind": "TrainingSession", "name": name, "uid": f"uid-{name}"}

    def cluster(self, name: str, workers: int = 1) -> None:
        metadata = {"name": name, "ownerReferences": [self._owner_of(name)]}
        manifest = {"metadata": metadata, "spec": {"workerGroupSpecs": [{"replicas": workers}]}}
        self.note("RayCluster", stored(manifest, 1))

    def pod(self, session: str, name: str, node: str | None) -> set[str]:
        owner = {"kind": "RayCluster", "name": session, "uid": f"uid-{session}"}
        own = {"tinkercloud.dev/session": session}
        metadata = {"name": f"{session}-{name}", "ownerReferences": [owner], "labels": own}
        spec = {} if node is None else {"nodeName": node}
        return self.note("Pod", stored({"metadata": metadata, "spec": spec}, 2))

    def start(self, name: str) -> set[str]:
        """Give a session its pods, all of which are scheduled; return who is enqueued."""
        self.cluster(name)
        session = {**self._made[name], "status": conditions(ClusterProvisioned="True")}
        return self.note("TrainingSession", session)

    def end(self, name: str) -> set[str]:
        """Delete the RayCluster of a session, and the session; return who is enqueued."""
        manifest = stored({"metadata": {"name": name}, "spec": {}}, 1)
        cluster = {**manifest["metadata"], "ownerReferences": [self._owner_of(name)]}
        freed = self.watched.note("RayCluster", {"metadata": cluster, "spec": {}}, is_gone=True)
        return (freed | self.watched.note("TrainingSession", self._made[name], is_gone=True)) - {
            name
        }

    def turn(self, name: str) -> str | None:
        self.watched.admit(name)
        return self.read_turn(name)

    def read_turn(self, name: str) -> str | None:
        found = snapshot(self.watched, name)
        assert found is not None
        return found.limits.start_order_message


def test_the_younger_of_two_competing_sessions_waits_and_names_the_older_one() -> None:
    queue = Queue(**HALF)
    queue.make("first", status={"message": "1 Insufficient nvidia.com/gpu"})
    queue.make("second", second=1)

    assert queue.turn("first") is None
    assert queue.turn("second") == (
        "waiting for other sessions to be scheduled: 1 session is ahead; TrainingSession first is"
        " next, but not all of its pods are scheduled yet: 1 Insufficient nvidia.com/gpu"
    )


def test_reading_whose_turn_it_is_gives_nobody_a_turn() -> None:
    queue = Queue(**HALF)
    queue.make("young", second=2)
    assert queue.read_turn("young") is None
    assert queue.read_turn("young") is None

    queue.make("old", second=1)

    assert queue.turn("old") is None
    assert queue.turn("young") is not None


def test_a_suspended_session_gets_no_turn_before_it_is_resumed() -> None:
    queue = Queue(**HALF)
    queue.make("young", second=2, suspend=True)
    queue.turn("young")
    queue.make("old", second=1)
    assert queue.turn("old") is None

    queue.make("young", second=2)

    assert queue.turn("young") is not None


def test_a_session_learns_nothing_of_those_of_other_owners_but_their_number() -> None:
    queue = Queue(**HALF)
    secret = "0/4 nodes are available: 4 node(s) lack label dataset=secret-project-x"
    queue.make("layoffs", status={"message": secret}, owner="eve")
    queue.make("victim", second=1)

    assert queue.turn("layoffs") is None
    assert queue.turn("victim") == "waiting for other sessions to be scheduled: 1 session is ahead"


def test_many_sessions_of_one_owner_delay_another_owner_by_none() -> None:
    queue = Queue(**HALF)
    for index in range(30):
        queue.make(f"a{index:02}", second=index, owner="hog")
    assert queue.turn("a00") is None
    queue.make("victim", second=40)

    assert "1 session is ahead" in str(queue.turn("victim"))
    assert "2 sessions are ahead" in str(queue.turn("a01"))
    placed = queue.start("a00")

    assert "victim" in placed
    assert queue.turn("a01") is not None
    assert queue.turn("victim") is None


def test_a_session_that_ends_lets_its_owner_start_another_before_those_who_have_more() -> None:
    queue = Queue(**HALF)
    for second, (name, owner) in enumerate({"a": "ada", "b": "bob", "c": "bob"}.items()):
        queue.make(name, second, owner=owner)
        queue.start(name)
    queue.make("first-of-bob", second=10, owner="bob")
    queue.make("first-of-ada", second=11, owner="ada")
    assert queue.turn("first-of-bob") is not None

    queue.end("b")
    freed = queue.end("c")

    assert freed == {"first-of-bob"}
    assert queue.turn("first-of-bob") is None


OWNERS = ("ada", "bob", "eve")
arrivals = st.lists(st.sampled_from(OWNERS), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(arrivals, st.lists(st.integers(0, 9), max_size=8), st.randoms(use_true_random=False))
def test_in_any_order_one_session_at_a_time_starts_and_none_starves(
    owners: Sequence[str], ends: Sequence[int], chance: Any
) -> None:
    queue, held = Queue(**HALF), Counter[str]()
    waiting = {f"s{index}": owner for index, owner in enumerate(owners)}
    for index, (name, owner) in enumerate(waiting.items()):
        queue.make(name, second=index, owner=owner)
    running: list[tuple[str, str]] = []
    for round_number in range(len(owners)):
        fewest = min(held[owner] for owner in waiting.values())
        expected = next(name for name, owner in waiting.items() if held[owner] == fewest)
        names = list(waiting)
        chance.shuffle(names)

        started = {name for name in names * 2 if queue.turn(name) is None}

        assert started == {expected}
        queue.start(expected)
        owner = waiting.pop(expected)
        held[owner] += 1
        running.append((expected, owner))
        if round_number < len(ends) and ends[round_number] < len(running):
            gone, of = running.pop(ends[round_number])
            held[of] -= 1
            queue.end(gone)


def test_an_owner_who_always_creates_more_delays_each_session_of_another_by_one() -> None:
    queue = Queue(**HALF)
    waiting = ["v0", "v1", "v2"]
    for index, name in enumerate(waiting):
        queue.make(name, second=50 + index, owner="victim")
    started = []
    for number in range(6):
        queue.make(f"h{number}", second=number, owner="hog")
        waiting.append(f"h{number}")
        started += [next(each for each in waiting if queue.turn(each) is None)]
        queue.start(started[-1])
        waiting.remove(started[-1])

    assert started == ["h0", "v0", "h1", "v1", "h2", "v2"]


def test_a_small_session_does_not_overtake_an_older_large_one() -> None:
    queue = Queue(**HALF)
    queue.make("large")
    queue.make("small", second=1, trainer={"replicas": 1}, sampler={"replicas": 1})
    queue.make("last", second=2)

    assert queue.turn("small") is not None
    assert "2 sessions are ahead" in str(queue.turn("last"))


def test_only_one_of_two_sessions_created_in_the_same_second_is_admitted() -> None:
    queue = Queue(**HALF)
    queue.make("b")
    assert queue.turn("b") is None

    queue.make("a")

    assert queue.turn("a") is not None
    queue.cluster("b")
    assert queue.turn("a") is not None
    assert queue.turn("b") is None


PLACED: Mapping[str, Json] = {
    "it has its nodes": conditions(ClusterProvisioned="True"),
    "it is refused": conditions(Accepted="False"),
    "it needs help": conditions(Stalled="True"),
    "it is suspended": conditions(Suspended="True"),
    "it stops": conditions(Suspended="Unknown"),
    "it is over": {"finishedTime": "2026-01-01T12:00:00Z"},
    "Kueue holds it back": conditions(QuotaReserved="False") | {"rayCluster": "first"},
}


@pytest.mark.parametrize("status", PLACED.values(), ids=PLACED)
def test_a_session_stops_waiting_when_the_older_one_is(status: Json) -> None:
    queue = Queue(**HALF)
    queue.make("first")
    queue.make("second", second=1)
    assert queue.turn("second") is not None

    queue.make("first", status=status)

    assert queue.turn("second") is None


def test_a_resumed_session_waits_for_one_admitted_in_the_meantime() -> None:
    queue = Queue(**HALF)
    queue.make("first", status=conditions(Suspended="True"))
    queue.make("second", second=1)
    assert queue.turn("second") is None

    assert queue.turn("first") is not None


def test_the_next_session_is_enqueued_when_the_one_before_it_is_scheduled() -> None:
    queue = Queue(**HALF)
    for name, second in (("first", 1), ("third", 3), ("second", 2)):
        queue.make(name, second)
    assert queue.turn("first") is None

    still_waiting = queue.make("first", 1, conditions(ClusterProvisioned="False"))
    placed = queue.make("first", 1, conditions(ClusterProvisioned="True"))

    assert still_waiting == {"first"}
    assert placed == {"first", "second"}
    assert queue.turn("second") is None


def test_a_session_is_scheduled_once_all_of_its_pods_are() -> None:
    queue = Queue(**HALF)
    queue.make("first")
    queue.make("second", second=1)
    assert queue.turn("first") is None

    queue.cluster("first", workers=2)
    assert queue.pod("first", "head", "node-1") == {"first"}
    assert queue.pod("first", "trainer-1", None) == {"first"}
    assert queue.pod("first", "trainer-2", "node-2") == {"first"}
    assert queue.turn("second") is not None

    assert queue.pod("first", "trainer-1", "node-1") == {"first", "second"}
    assert queue.turn("second") is None


def test_a_session_with_pods_does_not_wait() -> None:
    queue = Queue(**HALF)
    queue.make("first")
    queue.make("second", second=1)

    queue.cluster("second")

    assert queue.turn("second") is None


def test_the_order_can_be_switched_off() -> None:
    queue = Queue(**HALF)
    queue.make("first")
    queue.make("second", second=1)

    queue.watched.starts_in_order = False
    assert queue.turn("second") is None


@pytest.mark.parametrize(
    "offer",
    [
        {},
        {**HALF, "placement": {"queueName": "research"}},
        {**HALF, "placement": {"schedulerName": "volcano"}},
        {"trainer": {"replicas": 2, "cpuRanksPerReplica": 1}},
    ],
    ids=["no GPUs", "Kueue", "another scheduler", "CPUs"],
)
def test_sessions_that_others_admit_or_without_devices_are_not_ordered(offer: Json) -> None:
    queue = Queue(**offer)
    queue.make("first")
    queue.make("second", second=1)

    assert queue.turn("second") is None


def a_claim(**offer: Any) -> Any:
    found = claim(a_session(), a_base_model(**HALF | offer))
    assert found is not None
    return found


ELSEWHERE = {"placement": {"nodeSelector": {"gpu": "L40S"}}}


@pytest.mark.parametrize(
    ("one", "other", "do"),
    [
        ({}, {}, True),
        ({}, ELSEWHERE, True),
        ({"placement": {"nodeSelector": {"gpu": "H100"}}}, ELSEWHERE, False),
        ({"placement": {"nodeSelector": {"zone": "a"}}}, ELSEWHERE, True),
        ({"placement": {"priorityClassName": "high"}}, {}, False),
        (
            {"placement": {"nodeSelector": {"gpu": "H100"}}, "sampler": ENGINES | ELSEWHERE},
            ELSEWHERE,
            True,
        ),
    ],
    ids=["equal", "anywhere", "other nodes", "overlapping labels", "preemption", "engines only"],
)
def test_sessions_compete_if_a_node_may_match_both(one: Json, other: Json, do: bool) -> None:
    assert compete(a_claim(**one), a_claim(**other)) is do
    assert compete(a_claim(**other), a_claim(**one)) is do


def test_sessions_of_two_models_compete_for_the_same_nodes() -> None:
    queue = Queue(**HALF)
    queue.note("BaseModel", stored(a_base_model_manifest("m", modelName=OTHER, **HALF), 0))
    queue.make("first", baseModel=OTHER)
    queue.make("second", second=1, baseModel=MODEL_NAME)

    assert queue.turn("second") is not None


def test_a_waiting_session_is_queued_without_pods_and_rechecked() -> None:
    world = a_world("workers", "an older session waits for nodes")

    plan = reconcile(world.observe(), SETTINGS)
    world.happen("the operator reconciles", "KubeRay works")

    assert plan.actions == ()
    assert plan.requeue_after_seconds == 60
    assert world.children == {}
    assert world.status.phase == "Queued"
    quota = {each.type: each for each in world.status.conditions}[ConditionType.QUOTA_RESERVED]
    assert (quota.reason, quota.message) == (
        "Queued",
        "waiting for other sessions to be scheduled: 2 sessions are ahead",
    )


def test_an_admitted_session_gets_its_pods() -> None:
    world = a_world("workers", "an older session waits for nodes", "the operator reconciles")

    world.happen("the older session is scheduled")
    world.settle()

    assert world.status.phase == "Ready"
