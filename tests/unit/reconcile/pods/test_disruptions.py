"""A session whose pods or nodes are about to end saves its state in time and resumes elsewhere."""

import pytest

from tinkercloud_crds.base_model import CORDON
from tinkercloud_crds.conditions import ConditionType, Reason, find
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.read.parsing import blocking_taints, pod, slim
from tinkercloud_operator.decide.session.lifetime import decide
from tinkercloud_operator.spec.observed import ChildKey, Pod
from tinkercloud_testing.resources.session_world import (
    RAY_CLUSTER,
    SETTINGS,
    SPOT_NOTICE,
    World,
    a_world,
)
from tinkercloud_testing.resources.sessions import (
    NOON,
    TRAINERS,
    Json,
    a_base_model,
    a_pod,
    observed,
)

BUDGET = ChildKey("PodDisruptionBudget", "one")
LOOK = "the operator reconciles"
STOP_SECONDS = SETTINGS.stop_seconds_of(None)
NOTICES = ["the trainers are evicted", "a node gets a spot notice"]


@pytest.mark.parametrize("event", NOTICES)
@pytest.mark.parametrize("offer", ["workers", "engines", "queue"])
def test_a_session_with_notice_saves_its_state_and_resumes(offer: str, event: str) -> None:
    world = a_world(offer, "it settles", "a client sends a request")
    head = world.status.incarnation

    world.happen(event, "it settles")

    assert world.status.phase == "Ready"
    assert world.status.saved_incarnation == head != world.status.incarnation
    assert world.status.restarts == 0


def test_a_session_leaves_a_node_that_ends() -> None:
    world = a_world("workers", "it settles", "a node gets a spot notice", "it settles")

    assert {each.node for each in world.pods.values()} == {"node-1"}


@pytest.mark.parametrize("event", NOTICES)
def test_the_condition_says_what_disrupts_the_session(event: str) -> None:
    world = a_world("workers", "it settles", event, LOOK)

    suspended = find(world.status.conditions, ConditionType.SUSPENDED)
    assert suspended is not None
    assert (suspended.status, suspended.reason) == ("Unknown", Reason.DISRUPTED)
    assert "saving the state" in suspended.message


def seconds_until_deletion(world: World) -> float:
    """Let the operator look every second; return when the RayCluster is deleted."""
    start = world.known.now
    while "deletionTimestamp" not in world.children[RAY_CLUSTER]["metadata"]:
        world.operate()
        world.pass_time(1)
        assert (world.known.now - start).total_seconds() < 2 * STOP_SECONDS
    return (world.known.now - start).total_seconds()


@pytest.mark.parametrize("event", NOTICES)
@pytest.mark.parametrize("trouble", ["the store is away", "the head stops responding"])
def test_a_disrupted_session_has_a_limited_time_to_save(trouble: str, event: str) -> None:
    world = a_world("workers", "it settles", trouble, event)

    assert STOP_SECONDS - 3 < seconds_until_deletion(world) < STOP_SECONDS + 3


def test_the_time_is_limited_even_after_the_evicted_pod_has_ended() -> None:
    world = a_world("workers", "it settles", "the store is away", "the trainers are evicted", LOOK)

    world.happen("a pod advances", "a pod advances", "KubeRay works", "KubeRay works")

    assert STOP_SECONDS - 9 < seconds_until_deletion(world) < STOP_SECONDS + 3


def test_a_restarted_operator_does_not_extend_the_time() -> None:
    world = a_world("workers", "it settles", "the store is away", "the trainers are evicted", LOOK)
    world.pass_time(STOP_SECONDS / 2)

    world.happen("the operator crashes before any write")

    assert seconds_until_deletion(world) < STOP_SECONDS / 2 + 3


def test_a_session_that_was_stopping_gets_the_time_to_save_from_its_eviction_on() -> None:
    world = a_world("workers", "it settles", "the store is away", "a node is cordoned", LOOK)
    world.pass_time(3600)

    world.happen("the trainers are evicted")

    assert STOP_SECONDS - 3 < seconds_until_deletion(world) < STOP_SECONDS + 3


@pytest.mark.parametrize("event", ["the engines are evicted", "the head is evicted"])
def test_engines_and_heads_that_are_evicted_need_no_suspension(event: str) -> None:
    world = a_world("engines", "it settles", event, LOOK)

    suspended = find(world.status.conditions, ConditionType.SUSPENDED)
    assert suspended is not None
    assert suspended.status == "False"


def test_a_spot_notice_of_an_engine_needs_no_suspension() -> None:
    engine = a_pod("sampler", node="node-0")
    taints = {"node-0": frozenset({SPOT_NOTICE})}

    assert decide(observed(pods=(engine,), node_taints=taints), None, None).desired == "Running"


def test_an_eviction_by_kueue_does_not_delete_the_ray_cluster() -> None:
    world = a_world("queue", "it settles", "Kueue evicts", "the trainers are evicted", LOOK, LOOK)

    assert "deletionTimestamp" not in world.children[RAY_CLUSTER]["metadata"]


def test_a_session_that_has_not_served_has_nothing_to_save() -> None:
    world = a_world("workers", *[LOOK, "KubeRay works", "a pod advances"] * 4)

    world.happen("the trainers are evicted", LOOK)

    suspended = find(world.status.conditions, ConditionType.SUSPENDED)
    assert suspended is not None
    assert suspended.status == "False"


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_base_model_may_leave_its_sessions_on_cordoned_nodes_until_asked(is_asked: bool) -> None:
    base_model = a_base_model(trainer=TRAINERS, sessions={"leaveTaints": []})
    world = World(base_model)
    world.happen("it settles", "a node is cordoned")
    if is_asked:
        world.happen("it is asked to leave a node")

    world.happen("it settles")

    nodes = {each.node for each in world.pods.values()}
    assert nodes == ({"node-1"} if is_asked else {"node-0"})


def test_a_session_does_not_leave_a_node_that_takes_new_pods() -> None:
    world = a_world("workers", "it settles")
    head = world.status.incarnation

    world.happen("it is asked to leave a node", "it settles")

    assert world.status.incarnation == head


def test_the_budget_allows_evictions_as_soon_as_the_state_is_saved() -> None:
    world = a_world("workers", "it settles", "a node is cordoned")
    kept = []
    while "deletionTimestamp" not in world.children[RAY_CLUSTER]["metadata"]:
        kept.append((world.status.saved_incarnation is not None, BUDGET in world.children))
        world.happen(LOOK)

    assert kept
    assert all(has_budget for _, has_budget in kept)
    assert BUDGET not in world.children


def a_manifest(component: str, conditions: Json, **metadata: object) -> Manifest:
    labels = {"tinkercloud.dev/component": component}
    listed = [
        {"type": kind, "status": truth, "lastTransitionTime": "2026-01-01T11:59:00Z"}
        for kind, truth in conditions.items()
    ]
    named = {"name": "p", "uid": "u", "labels": labels, **metadata}
    return slim("Pod", {"metadata": named, "spec": {}, "status": {"conditions": listed}})


DELETED = {"deletionTimestamp": "2026-01-01T12:02:00Z", "deletionGracePeriodSeconds": 120}


def test_a_pod_is_disrupted_from_the_request_to_delete_it() -> None:
    assert pod(a_manifest("trainer", {"Ready": "True"}, **DELETED)).disrupted == NOON


def test_a_preempted_pod_is_disrupted_before_its_deletion() -> None:
    manifest = a_manifest("trainer", {"Ready": "True", "DisruptionTarget": "True"})

    assert pod(manifest).disrupted is not None


@pytest.mark.parametrize(
    "manifest",
    [
        a_manifest("trainer", {"Ready": "True"}),
        a_manifest("trainer", {"Ready": "True", "DisruptionTarget": "False"}),
        a_manifest("trainer", {"Ready": "False"}, **DELETED),
        a_manifest("trainer", {}, **DELETED),
    ],
)
def test_pods_that_stay_or_do_not_run_are_not_disrupted(manifest: Manifest) -> None:
    assert pod(manifest).disrupted is None


def test_only_taints_that_keep_pods_off_a_node_count() -> None:
    taints = [
        {"key": "a", "effect": "NoSchedule"},
        {"key": "b", "effect": "NoExecute"},
        {"key": "c", "effect": "PreferNoSchedule"},
    ]
    manifest = {"metadata": {"name": "n"}, "spec": {"taints": taints, "unschedulable": True}}

    assert blocking_taints(manifest) == {"a", "b", CORDON}


def a_tolerant_pod(*keys: str) -> Pod:
    return a_pod("trainer", node="node-0", tolerations=frozenset(keys))


@pytest.mark.parametrize(("keys", "stays"), [((SPOT_NOTICE,), True), (("",), True), ((), False)])
def test_pods_that_tolerate_a_notice_stay(keys: tuple[str, ...], stays: bool) -> None:
    taints = {"node-0": frozenset({SPOT_NOTICE})}

    decision = decide(observed(pods=(a_tolerant_pod(*keys),), node_taints=taints), None, None)

    assert (decision.desired == "Running") == stays
