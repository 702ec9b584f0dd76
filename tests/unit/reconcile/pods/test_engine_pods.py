"""Sessions whose number of engines follows the load: pods, readiness, status, limits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_crds import labels
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.names import Names
from tinkercloud_crds.training_session import SamplerOverride
from tinkercloud_operator.children.pods import Build
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_operator.children.support_objects import disruption_budget, head_config
from tinkercloud_operator.decide.pods.engine_pods import engine_pods, existing_engines, is_scaled
from tinkercloud_operator.decide.session.actions import Apply
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import ChildKey, Observed, Pod
from tinkercloud_operator.spec.resolved import (
    Rejection,
    ResolvedSpec,
    check_pod_groups,
    resolve,
)
from tinkercloud_testing.resources.sessions import (
    ENGINES,
    TRAINERS,
    Json,
    a_base_model,
    a_pod,
    a_session,
    changed,
    observed,
)

RAY_CLUSTER = ChildKey("RayCluster", "one")


def an_offer(least: int = 1, most: int = 4, **others: Any) -> BaseModelSpec:
    engines = {"minReplicas": least, "maxReplicas": most, "targetSamples": 8}
    return a_base_model(
        trainer=TRAINERS, sampler=ENGINES | {"replicas": 0, "engines": engines}, **others
    )


def resolved(offer: BaseModelSpec, replicas: int | None = None) -> ResolvedSpec:
    sampler = SamplerOverride(replicas=replicas) if replicas is not None else None
    found = resolve(a_session(sampler=sampler), offer, 0)
    assert isinstance(found, ResolvedSpec)
    return found


def a_cluster(offer: BaseModelSpec, engines: int) -> Json:
    """Return the RayCluster of a session with a number of engines."""
    return ray_cluster(Build(Names("one"), resolved(offer), Settings(), engines=engines))


def running(offer: BaseModelSpec, engines: int, needed: int | None = None) -> Observed:
    return observed(
        base_model=offer,
        has_secret=True,
        has_finalizer=True,
        children={RAY_CLUSTER: a_cluster(offer, engines)},
        pods=tuple(ready_pods(["head", "trainer", "trainer", "sampler"])),
        engines_needed=needed,
    )


def ready_pods(components: list[str]) -> list[Pod]:
    return [
        replace(a_pod(component), name=f"{component}-{number}", uid=f"{component}-{number}")
        for number, component in enumerate(components)
    ]


def applied(session: Observed) -> Mapping[str, Mapping[str, Any]]:
    actions = reconcile(session, Settings()).actions
    return {each.manifest["kind"]: each.manifest for each in actions if isinstance(each, Apply)}


def test_a_new_session_starts_the_fewest_engines_and_the_head_knows_all_addresses() -> None:
    offer = an_offer(2, 4)
    cluster = applied(observed(base_model=offer, has_finalizer=True, has_secret=True))["RayCluster"]

    groups = {each["groupName"]: each for each in cluster["spec"]["workerGroupSpecs"]}
    replicas = {name: group["replicas"] for name, group in groups.items()}
    assert replicas == {
        "trainer": 2,
        "sampler-0": 1,
        "sampler-1": 1,
        "sampler-2": 0,
        "sampler-3": 0,
    }
    bounds = {name: (each["minReplicas"], each["maxReplicas"]) for name, each in groups.items()}
    assert bounds["sampler-1"] == (1, 1)
    assert bounds["sampler-2"] == (0, 1)
    inference = head_config(Build(Names("one"), resolved(offer), Settings())).sampler.inference
    assert len(inference.urls) == 4
    assert inference.scaling is not None
    assert (inference.scaling.min_engines, inference.scaling.target_samples) == (2, 8)


def test_the_engines_that_the_head_needs_are_started_and_removed() -> None:
    offer = an_offer()

    more = applied(running(offer, 1, needed=3))["RayCluster"]
    fewer = applied(running(offer, 3, needed=1))["RayCluster"]

    assert existing_engines(more) == 3
    assert existing_engines(fewer) == 1
    for engines in (1, 3):
        assert existing_engines(applied(running(offer, engines))["RayCluster"]) == engines


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 20), st.none() | st.integers(0, 100))
def test_the_number_stays_within_its_bounds(
    least: int, more: int, existing: int, needed: int | None
) -> None:
    offer = an_offer(least, least + more)
    session = observed(
        base_model=offer,
        children={RAY_CLUSTER: a_cluster(offer, existing)},
        engines_needed=needed,
    )

    number = engine_pods(session, resolved(offer))

    assert least <= number <= least + more
    if needed is None:
        assert number == existing_engines(session.ray_cluster)
    elif least <= needed <= least + more:
        assert number == needed


def test_a_session_is_ready_without_the_engines_beyond_the_minimum() -> None:
    offer = an_offer()
    starting = replace(a_pod("sampler"), name="sampler-9", is_ready=False, is_scheduled=False)
    session = changed(running(offer, 2), scaled_pods=(starting,))

    status = reconcile(session, Settings()).status

    assert status is not None
    assert status.phase == "Ready"
    assert status.workers.samplers == "1/2"
    assert (status.gpus, status.max_gpus) == (8 + 2 * 2, 8 + 4 * 2)


def test_the_disruption_budget_does_not_protect_engines_beyond_the_minimum() -> None:
    build = Build(Names("one"), resolved(an_offer()), Settings())
    budget = disruption_budget(build)["spec"]
    groups = ray_cluster(build)["spec"]["workerGroupSpecs"]

    def is_scaled_pod(group: Json) -> bool:
        return labels.SCALED_LABEL in group["template"]["metadata"]["labels"]

    assert budget["minAvailable"] == 4
    assert budget["selector"]["matchExpressions"] == [
        {"key": labels.SCALED_LABEL, "operator": "DoesNotExist"}
    ]
    assert [is_scaled_pod(group) for group in groups] == [False, False, True, True, True]


def test_a_session_may_lower_the_maximum() -> None:
    few = resolved(an_offer(2, 4), replicas=1)

    assert (few.samplers, few.most_samplers) == (1, 1)
    assert (resolved(an_offer(2, 4), replicas=3).most_samplers) == 3
    more = resolve(a_session(sampler=SamplerOverride(replicas=5)), an_offer(2, 4), 0)
    assert isinstance(more, Rejection)
    assert "5 exceeds the BaseModel's limit of 4" in more.message


def test_engines_with_a_queue_of_kueue_do_not_scale() -> None:
    found = check_pod_groups(resolved(an_offer(placement={"queueName": "research"})), 8)

    assert isinstance(found, Rejection)
    assert "maxReplicas: not supported with queue 'research'" in found.message


@pytest.mark.parametrize("sampler", [ENGINES, {}], ids=["engines", "no engines"])
def test_sessions_with_a_fixed_number_of_engines_are_not_scaled(sampler: Json) -> None:
    offer = a_base_model(trainer=TRAINERS, sampler=sampler)

    assert not is_scaled(a_cluster(offer, 2 if sampler else 0))
    assert is_scaled(a_cluster(an_offer(), 1))
