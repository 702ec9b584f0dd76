"""Sessions in a Kueue queue: Kueue evicts an admitted RayCluster whose pod templates change."""

from collections.abc import Mapping
from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_operator.decide.session.actions import Apply, Plan
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import ChildKey
from tinkercloud_testing.resources.session_world import (
    OFFERS,
    RAY_CLUSTER,
    SETTINGS,
    World,
    a_world,
)
from tinkercloud_testing.resources.sessions import TRAINERS, Json, a_base_model, a_pod, observed


def queued_cluster(**spec: Any) -> Mapping[ChildKey, Json]:
    queue = {labels.QUEUE_LABEL: "research"}
    return {RAY_CLUSTER: {"metadata": {"name": "one", "labels": queue}, "spec": spec}}


@pytest.mark.parametrize("base_model", [a_base_model(), None], ids=["without a queue", "gone"])
def test_the_queue_is_read_from_the_live_ray_cluster(base_model: BaseModelSpec | None) -> None:
    session = observed(base_model=base_model, children=queued_cluster(suspend=True))

    status = reconcile(session, SETTINGS).status

    assert status is not None
    assert status.phase == "Queued"
    assert "LocalQueue 'research'" in (status.message or "")
    assert status.gpus == 0


def test_an_eviction_by_kueue_is_reported() -> None:
    session = observed(children=queued_cluster(suspend=True), pods=(a_pod(is_terminating=True),))

    status = reconcile(session, SETTINGS).status

    assert status is not None
    assert status.phase == "Queued"
    assert "evicted" in (status.message or "")


def plan_after_change(world: World, **offer: Any) -> Plan:
    """Return the plan of a settled session whose BaseModel changes."""
    changed = OFFERS["queue"].model_dump() | offer
    world.change(base_model=BaseModelSpec.model_validate(changed))
    return reconcile(world.observe(), SETTINGS)


def applied(plan: Plan) -> list[str]:
    return [action.manifest["kind"] for action in plan.actions if isinstance(action, Apply)]


def test_an_admitted_ray_cluster_is_not_updated_since_that_would_evict_it() -> None:
    world = a_world("queue", "it settles")
    pods = world.children[RAY_CLUSTER]["spec"]["headGroupSpec"]["template"]["spec"]
    pods["tolerations"] = [{"key": "added-by-kueue", "operator": "Exists"}]

    assert applied(plan_after_change(world, head={"image": "another"})) == []
    assert applied(reconcile(world.observe(), Settings(run_as_user=4321))) == []


def test_a_queued_ray_cluster_is_updated() -> None:
    world = a_world("queue", "it settles", "Kueue evicts")

    plan = plan_after_change(world, head={"image": "another"})

    assert applied(plan) == ["RayCluster"]


def test_changed_replicas_of_an_admitted_ray_cluster_are_restored() -> None:
    world = a_world("queue", "it settles")
    [trainers] = world.children[RAY_CLUSTER]["spec"]["workerGroupSpecs"]
    trainers["replicas"] = 1

    plan = reconcile(world.observe(), SETTINGS)

    assert applied(plan) == ["RayCluster"]


def test_replicas_of_a_changed_base_model_are_not_applied_to_an_admitted_ray_cluster() -> None:
    world = a_world("queue", "it settles")

    plan = plan_after_change(world, trainer=TRAINERS | {"replicas": 4})

    assert applied(plan) == []
