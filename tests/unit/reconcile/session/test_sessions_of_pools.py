"""Sessions that share a cluster of a pool: their status is the cluster's, and they have no pods."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.conditions import ConditionType, Reason, find, moved
from tinkercloud_operator.decide.session.actions import (
    Apply,
    DeleteSession,
    Plan,
    RemoveModel,
    SaveRequest,
    SetFinalizer,
)
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.spec.observed import Observed, PoolCluster
from tinkercloud_testing.resources.session_world import SETTINGS, World
from tinkercloud_testing.resources.sessions import NOON, a_base_model, a_session, changed, observed

SHARED = a_base_model(sharing="Shared")
RUN = a_session(sharing="Shared", modelId="one:train:0")
URL = "http://pool-a-head.default.svc:8000"


def a_cluster(**fields: Any) -> PoolCluster:
    """Return a cluster, by default ready."""
    ready: dict[str, Any] = {"endpoint": URL, "incarnation": "head-0", "has_pods": True}
    return PoolCluster("pool-a", conditions=[], **ready | fields)


def a_run(cluster: PoolCluster | None = None, **fields: Any) -> Observed:
    values = {"spec": RUN, "base_model": SHARED, "is_declared": False, "has_finalizer": True}
    return observed(**values | {"pool_cluster": cluster} | fields)


def condition_of(plan: Plan, kind: ConditionType = ConditionType.READY) -> tuple[str, str]:
    assert plan.status is not None
    condition = find(plan.status.conditions, kind)
    assert condition is not None
    return condition.status, condition.reason


def test_a_run_without_a_place_waits_and_has_no_children() -> None:
    plan = reconcile(a_run(pool_message="all 8 slots are taken"), SETTINGS)

    assert plan.actions == ()
    assert condition_of(plan) == ("False", Reason.POOL_FULL)
    assert condition_of(plan, ConditionType.ACCEPTED) == ("True", Reason.ACCEPTED)
    assert plan.status is not None
    assert (plan.status.phase, plan.status.message) == ("Queued", "all 8 slots are taken")
    assert plan.status.endpoint is None


def test_a_suspended_run_on_a_cluster_is_settled_although_the_head_keeps_its_model() -> None:
    suspended = a_run(a_cluster(), spec=RUN.model_copy(update={"suspend": True}))

    plan = reconcile(suspended, SETTINGS)

    assert condition_of(plan) == ("False", Reason.SUSPENDED)
    assert condition_of(plan, ConditionType.RECONCILING) == ("False", Reason.STABLE)


def test_what_was_started_before_a_spare_was_taken_over_is_deleted_once_its_pods_are_gone() -> None:
    world = World(a_base_model(warm_spares=1), is_declared=False)
    world.settle()
    spare = world.known.session.spec.model_copy(
        update={"model_id": "one:train:0", "pool_cluster": "s"}
    )
    world.change(spec=spare, pool_cluster=a_cluster())

    world.operate()
    kinds_with_pods = {key.kind for key in world.children}
    world.settle()

    assert "Service" in kinds_with_pods
    assert [key.name for key in world.children] == ["one-token"]


def test_a_placed_run_shows_that_it_is_not_durable() -> None:
    plan = reconcile(a_run(a_cluster(), degraded="the journal can't be written"), SETTINGS)

    kind = ConditionType.DURABILITY_DEGRADED
    assert condition_of(plan, kind) == ("True", Reason.WRITES_FAIL)


def test_a_placed_run_shows_once_that_it_could_not_be_moved() -> None:
    served = reconcile(a_run(a_cluster()), SETTINGS)
    assert served.status is not None
    failed = a_run(a_cluster(), move_failure="the store is full", status=served.status)
    plan = reconcile(failed, SETTINGS)
    assert plan.status is not None
    reported = changed(failed, status=plan.status)
    over = reconcile(changed(reported, move_failure=None), SETTINGS)

    kind = ConditionType.QUOTA_RESERVED
    assert condition_of(plan) == ("True", Reason.READY)
    assert condition_of(plan, kind) == ("True", Reason.MOVE_FAILED)
    assert plan.event is not None
    assert (plan.event.reason, plan.event.is_warning) == (Reason.MOVE_FAILED, True)
    assert "the store is full" in plan.event.message
    assert reconcile(reported, SETTINGS).event is None
    assert condition_of(over, kind) == ("True", Reason.PLACED)


def test_a_placed_run_waits_while_the_memory_of_its_cluster_has_no_room_for_it() -> None:
    message = "the memory of pool cluster pool-a has no room"

    plan = reconcile(a_run(a_cluster(), pool_message=message), SETTINGS)

    assert condition_of(plan) == ("False", Reason.POOL_FULL)
    assert condition_of(plan, ConditionType.QUOTA_RESERVED) == ("True", Reason.PLACED)
    assert plan.status is not None
    assert (plan.status.phase, plan.status.message) == ("Queued", message)
    assert plan.status.endpoint is None


def test_a_placed_run_is_as_ready_as_its_cluster() -> None:
    ready = reconcile(a_run(a_cluster()), SETTINGS)
    waits = reconcile(a_run(a_cluster(endpoint=None)), SETTINGS)

    assert condition_of(ready) == ("True", Reason.READY)
    assert ready.status is not None
    assert (ready.status.phase, ready.status.endpoint) == ("Ready", URL)
    assert ready.status.incarnation == "head-0"
    assert (ready.status.gpus, ready.status.ray_cluster) == (0, None)
    assert condition_of(waits) == ("False", Reason.POOL_CLUSTER_NOT_READY)
    assert waits.status is not None
    assert waits.status.endpoint is None


def test_a_run_says_why_its_cluster_is_not_ready_without_the_words_of_the_cluster() -> None:
    message = "could not suspend run-of-another-owner:train:0"
    why = moved(
        [],
        ConditionType.READY,
        "False",
        Reason.OUT_OF_MEMORY,
        message,
        generation=1,
        now=NOON,
    )

    plan = reconcile(a_run(replace(a_cluster(endpoint=None), conditions=[why])), SETTINGS)

    assert plan.status is not None
    assert plan.status.message == "pool cluster pool-a is not ready: OOMKilled"


def test_a_settled_run_costs_no_writes() -> None:
    status = reconcile(a_run(a_cluster()), SETTINGS).status
    assert status is not None

    again = reconcile(a_run(a_cluster(), status=status), SETTINGS)

    assert (again.actions, again.status, again.event) == ((), None, None)


def test_the_finalizer_is_set_before_a_run_gets_a_place() -> None:
    plan = reconcile(a_run(has_finalizer=False), SETTINGS)

    assert plan.actions == (SetFinalizer(present=True),)


def test_a_sampler_needs_no_finalizer_because_it_has_no_state() -> None:
    sampler = a_session(sharing="Shared", role="Sampler", lora=None)

    assert reconcile(a_run(spec=sampler, has_finalizer=False), SETTINGS).actions == ()


def test_a_run_is_rejected_when_its_base_model_has_no_pool() -> None:
    plan = reconcile(a_run(base_model=a_base_model()), SETTINGS)

    assert condition_of(plan, ConditionType.STALLED) == ("True", Reason.NOT_ALLOWED)
    assert plan.status is not None
    assert "the BaseModel has no pool" in (plan.status.message or "")


@pytest.mark.parametrize("base_model", [None, a_base_model()])
def test_a_run_that_is_served_continues_when_its_base_model_changes(
    base_model: BaseModelSpec | None,
) -> None:
    plan = reconcile(a_run(a_cluster(), base_model=base_model), SETTINGS)

    assert condition_of(plan) == ("True", Reason.READY)


def test_a_deleted_run_is_removed_from_its_head_before_the_finalizer_is() -> None:
    deleted = a_run(a_cluster(), deleted=NOON)
    request = RemoveModel("pool-a", URL, "head-0", "one:train:0", SETTINGS.last_checkpoint_seconds)

    assert reconcile(deleted, SETTINGS).actions == (request,)
    saved = {("remove", "head-0"): "tinker://one:train:0/weights/last"}
    done = reconcile(changed(deleted, completed_saves=saved), SETTINGS)
    assert done.actions == (SetFinalizer(present=False),)


def test_a_deletion_waits_for_a_head_that_restarts_for_a_limited_time() -> None:
    limit = timedelta(seconds=SETTINGS.last_checkpoint_seconds)
    deleted = a_run(a_cluster(endpoint=None), deleted=NOON)

    assert reconcile(deleted, SETTINGS).actions == ()
    late = reconcile(changed(deleted, now=NOON + limit), SETTINGS)
    assert late.actions == (SetFinalizer(present=False),)
    never_placed = reconcile(a_run(deleted=NOON), SETTINGS)
    assert never_placed.actions == (SetFinalizer(present=False),)


def test_a_run_that_reached_its_lifetime_frees_its_slot() -> None:
    spec = RUN.model_copy(update={"max_lifetime_seconds": 600})
    late = NOON + timedelta(seconds=600)

    served = reconcile(a_run(a_cluster(), spec=spec), SETTINGS).status

    plan = reconcile(a_run(a_cluster(), spec=spec, status=served, now=late), SETTINGS)

    assert [type(action) for action in plan.actions] == [RemoveModel]
    assert condition_of(plan) == ("False", Reason.SUSPENDING)
    assert plan.status is not None
    assert plan.status.finished_time is None
    saved = {("remove", "head-0"): "tinker://one:train:0/weights/last"}
    over = a_run(a_cluster(), spec=spec, status=plan.status, now=late, completed_saves=saved)
    plan = reconcile(over, SETTINGS)
    assert condition_of(plan) == ("False", Reason.LIFETIME_EXCEEDED)
    assert plan.status is not None
    assert plan.status.finished_time is not None
    assert plan.status.latest_checkpoint == saved["remove", "head-0"]


@pytest.mark.parametrize(("action", "deleted"), [("Suspend", False), ("Delete", True)])
def test_an_idle_run_is_deleted_if_its_policy_says_so_and_never_suspended(
    action: str, deleted: bool
) -> None:
    idle = a_session(
        sharing="Shared",
        modelId="one:train:0",
        idle={"timeoutSeconds": 600, "action": action},
    )
    served = reconcile(a_run(a_cluster(), spec=idle), SETTINGS).status
    late = NOON + timedelta(hours=1)

    plan = reconcile(a_run(a_cluster(), spec=idle, status=served, now=late), SETTINGS)

    assert (DeleteSession() in plan.actions) is deleted


def test_a_run_whose_client_left_before_it_was_placed_is_deleted() -> None:
    late = NOON + timedelta(minutes=11)

    plan = reconcile(a_run(pool_message="full", now=late), SETTINGS)

    assert DeleteSession() in plan.actions


def test_a_cluster_has_the_trainers_and_samplers_of_its_base_model() -> None:
    cluster = a_session(role="Pool", lora=None, owner="tinkercloud-pool")
    limited = a_base_model(sharing="Shared", limits={"maxSessionsPerOwner": 1})

    plan = reconcile(
        observed(spec=cluster, base_model=limited, has_finalizer=True, sessions_of_owner=7),
        SETTINGS,
    )

    kinds = {action.manifest["kind"] for action in plan.actions if isinstance(action, Apply)}
    assert "RayCluster" in kinds
    assert condition_of(plan, ConditionType.ACCEPTED) == ("True", Reason.ACCEPTED)


@pytest.mark.parametrize("action", ["Suspend", "Delete"])
def test_a_cluster_is_neither_suspended_for_idleness_nor_ended_by_its_age(action: str) -> None:
    idle = {"timeoutSeconds": 600, "action": action}
    sessions = {"idle": idle, "maxLifetimeSeconds": 1200}
    world = World(a_base_model(sharing="Shared", sessions=sessions))
    world.change(spec=a_session(role="Pool", lora=None, owner="tinkercloud-pool"))
    world.settle()

    world.pass_time(7200)
    assert reconcile(world.observe(), SETTINGS).actions == ()
    ready = find(world.status.conditions, ConditionType.READY)
    assert ready is not None
    assert ready.status == "True"


def test_the_head_of_a_deleted_cluster_has_as_much_time_as_one_that_is_suspended() -> None:
    world = World(SHARED)
    world.change(spec=a_session(role="Pool", lora=None, owner="tinkercloud-pool"))
    world.settle()

    world.delete()
    plan = reconcile(world.observe(), SETTINGS)

    [asked] = [action for action in plan.actions if isinstance(action, SaveRequest)]
    assert asked.timeout_seconds == SETTINGS.stop_seconds_of(None)


def test_the_head_of_a_deleted_cluster_saves_its_runs_so_that_others_resume_them() -> None:
    world = World(SHARED)
    world.change(spec=a_session(role="Pool", lora=None, owner="tinkercloud-pool"))
    world.settle()
    head = world.observe().head
    assert head is not None

    world.delete()
    plan = reconcile(world.observe(), SETTINGS)

    asked = [action for action in plan.actions if isinstance(action, SaveRequest)]
    assert [(each.kind, each.incarnation) for each in asked] == [("suspend", head.incarnation)]
    world.settle()
    assert world.is_gone
