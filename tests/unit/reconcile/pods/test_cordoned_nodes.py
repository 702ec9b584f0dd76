"""A session moves off cordoned nodes with its state, so that they can be drained."""

from dataclasses import replace

import pytest

from tinkercloud_crds.base_model import CORDON
from tinkercloud_crds.conditions import ConditionType, find
from tinkercloud_operator.decide.read.parsing import pod, slim
from tinkercloud_operator.decide.session.lifetime import decide
from tinkercloud_operator.spec.observed import Pod
from tinkercloud_testing.resources.session_world import a_world
from tinkercloud_testing.resources.sessions import Json, a_pod, changed, observed

CORDONED = {"node-0": frozenset({CORDON})}


@pytest.mark.parametrize("offer", ["head alone", "workers", "engines", "queue"])
def test_a_session_moves_off_a_cordoned_node_with_its_state(offer: str) -> None:
    world = a_world(offer, "it settles", "a client sends a request")
    head = world.status.incarnation

    world.happen("a node is cordoned", "it settles")

    assert world.status.phase == "Ready"
    assert {each.node for each in world.pods.values()} == {"node-1"}
    assert world.status.saved_incarnation == head != world.status.incarnation
    assert world.status.restarts == 0


def test_the_status_explains_a_move() -> None:
    world = a_world("workers", "it settles", "a node is cordoned", "the operator reconciles")

    suspended = find(world.status.conditions, ConditionType.SUSPENDED)
    assert world.status.phase == "Suspending"
    assert suspended is not None
    assert "node node-0 is cordoned" in suspended.message


def test_a_session_without_pods_on_the_cordoned_node_stays() -> None:
    world = a_world("workers", "it settles")
    head = world.status.incarnation

    world.happen("another node is cordoned", "it settles")

    assert world.status.incarnation == head


def test_a_started_move_completes_after_the_node_is_uncordoned() -> None:
    world = a_world("workers", "it settles", "a node is cordoned", "the operator reconciles")

    world.happen("the operator reconciles", "no node is cordoned", "it settles")

    assert world.status.phase == "Ready"
    assert world.status.restarts == 0


def test_a_pool_cluster_whose_runs_are_moved_keeps_its_pods_until_they_have_left() -> None:
    leaves = observed(pods=(replace(a_pod("head"), node="node-0"),), node_taints=CORDONED)

    assert decide(leaves, None, None).desired == "Suspended"
    assert decide(changed(leaves, is_emptied=True), None, None).desired == "Running"


def a_pod_that_tolerates(*tolerations: Json) -> Pod:
    metadata = {"name": "p", "uid": "u", "labels": {"tinkercloud.dev/component": "head"}}
    spec = {"nodeName": "node-0", "tolerations": list(tolerations)}
    return pod(slim("Pod", {"metadata": metadata, "spec": spec, "status": {}}))


@pytest.mark.parametrize(
    "toleration",
    [{"operator": "Exists"}, {"key": CORDON, "operator": "Exists", "effect": "NoSchedule"}],
)
def test_pods_that_tolerate_the_cordon_stay(toleration: Json) -> None:
    stays = a_pod_that_tolerates(toleration)
    moves = a_pod_that_tolerates({"key": "nvidia.com/gpu", "operator": "Exists"})
    kept = decide(observed(pods=(stays,), node_taints=CORDONED), None, None)
    moved = decide(observed(pods=(moves,), node_taints=CORDONED), None, None)

    assert kept.desired == "Running"
    assert moved.desired == "Suspended"


def test_spec_suspend_takes_precedence_over_a_cordon() -> None:
    world = a_world("workers", "it settles", "its owner suspends it", "a node is cordoned")

    world.settle()

    assert world.status.phase == "Suspended"


def test_a_pod_stuck_terminating_on_a_dead_node_does_not_block_its_session() -> None:
    stuck = a_pod(node="node-0", is_terminating=True)

    decision = decide(observed(pods=(stuck,), node_taints=CORDONED), None, None)

    assert decision.desired == "Running"


def test_an_unscheduled_pod_is_on_no_cordoned_node() -> None:
    waits = a_pod(is_scheduled=False, is_started=False, is_ready=False)

    assert decide(observed(pods=(waits,), node_taints=CORDONED), None, None).desired == ("Running")
