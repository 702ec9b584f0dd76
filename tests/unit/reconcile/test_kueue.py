"""A session in a queue: what Kueue admits, it evicts when its pods are described anew."""

from collections.abc import Mapping
from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_operator.decide.actions import Apply, Plan
from tinkercloud_operator.decide.reconcile import reconcile
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.snapshot import ChildKey
from tinkercloud_testing.session_world import OFFERS, RAY_CLUSTER, SETTINGS, World, a_world
from tinkercloud_testing.sessions import TRAINERS, Json, a_base_model, a_pod, observed


def queued_cluster(**spec: Any) -> Mapping[ChildKey, Json]:
    queue = {labels.QUEUE_LABEL: "research"}
    return {RAY_CLUSTER: {"metadata": {"name": "one", "labels": queue}, "spec": spec}}


@pytest.mark.parametrize("base_model", [a_base_model(), None], ids=["without a queue", "gone"])
def test_the_queue_that_counts_is_that_of_what_is_there(base_model: BaseModelSpec | None) -> None:
    session = observed(base_model=base_model, children=queued_cluster(suspend=True))

    status = reconcile(session, SETTINGS).status

    assert status is not None
    assert status.phase == "Queued"
    assert "LocalQueue 'research'" in (status.message or "")
    assert status.gpus == 0


def test_a_session_that_kueue_evicts_says_so() -> None:
    session = observed(children=queued_cluster(suspend=True), pods=(a_pod(is_terminating=True),))

    status = reconcile(session, SETTINGS).status

    assert status is not None
    assert status.phase == "Queued"
    assert "evicted" in (status.message or "")


def changed_under(world: World, **offer: Any) -> Plan:
    """Return what is done about a settled session when its BaseModel is changed."""
    changed = OFFERS["queue"].model_dump() | offer
    world.change(base_model=BaseModelSpec.model_validate(changed))
    return reconcile(world.observe(), SETTINGS)


def applied(plan: Plan) -> list[str]:
    return [action.manifest["kind"] for action in plan.actions if isinstance(action, Apply)]


def test_what_kueue_has_admitted_is_not_described_anew_which_would_end_its_pods() -> None:
    world = a_world("queue", "it settles")
    pods = world.children[RAY_CLUSTER]["spec"]["headGroupSpec"]["template"]["spec"]
    pods["tolerations"] = [{"key": "added-by-kueue", "operator": "Exists"}]

    assert applied(changed_under(world, head={"image": "another"})) == []
    assert applied(reconcile(world.observe(), Settings(run_as_user=4321))) == []


def test_what_waits_for_kueue_is_described_anew() -> None:
    world = a_world("queue", "it settles", "Kueue preempts")

    plan = changed_under(world, head={"image": "another"})

    assert applied(plan) == ["RayCluster"]


def test_numbers_of_pods_that_somebody_changed_are_worth_an_eviction() -> None:
    world = a_world("queue", "it settles")
    [trainers] = world.children[RAY_CLUSTER]["spec"]["workerGroupSpecs"]
    trainers["replicas"] = 1

    plan = reconcile(world.observe(), SETTINGS)

    assert applied(plan) == ["RayCluster"]


def test_other_numbers_of_pods_are_not_asked_of_what_kueue_has_admitted() -> None:
    world = a_world("queue", "it settles")

    plan = changed_under(world, trainer=TRAINERS | {"replicas": 4})

    assert applied(plan) == []
