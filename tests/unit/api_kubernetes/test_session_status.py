"""Every status of a TrainingSession is interpreted for clients; stale conditions are ignored."""

from dataclasses import replace
from typing import Any

import pytest

from tinkercloud_api.providers.base import HeadEnd, HeadFailed, Pending
from tinkercloud_api.providers.cluster.session_status import (
    Ended,
    Ready,
    TrainingSessionView,
    head_end,
    idle_since,
    read_base_model,
    read_session,
    readiness,
)
from tinkercloud_crds.conditions import NEVER_FITS, ConditionType, Reason
from tinkercloud_crds.times import parse_time
from tinkercloud_protocol.wire.errors import InvalidRequest, StateLost
from tinkercloud_protocol.wire.future_responses import QueueState

SERVING: dict[str, Any] = {"endpoint": "http://head:8000", "incarnation": "pod.0"}


def a_session(
    *conditions: dict[str, Any], suspend: bool = False, **status: Any
) -> TrainingSessionView:
    return read_session(
        {
            "metadata": {
                "name": "one",
                "uid": "u",
                "resourceVersion": "1",
                "generation": 2,
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {"baseModel": "tiny/llama", "owner": "me", "suspend": suspend},
            "status": {"phase": "FromTheFuture", "conditions": list(conditions), **status},
        }
    )


def a_condition(
    kind: ConditionType, status: str, reason: Reason, message: str = "", generation: int = 2
) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": "2026-01-02T00:00:00Z",
    }


READY = a_condition(ConditionType.READY, "True", Reason.READY)


def test_a_ready_session_with_an_endpoint_is_ready() -> None:
    assert readiness(a_session(READY, **SERVING)) == Ready("http://head:8000", "pod.0")


def test_a_condition_of_an_earlier_generation_is_ignored() -> None:
    old = a_condition(ConditionType.READY, "True", Reason.READY, generation=1)

    state = readiness(a_session(old, **SERVING))

    assert state == Pending("active", "TrainingSession one is waiting for the operator")


def test_a_session_without_status_waits_for_the_operator() -> None:
    assert readiness(a_session()) == Pending(
        "active", "TrainingSession one is waiting for the operator"
    )


@pytest.mark.parametrize(
    ("reason", "queue_state"),
    [
        (Reason.QUEUED, "paused_capacity"),
        (Reason.UNSCHEDULABLE, "paused_capacity"),
        (Reason.SCHEDULING_GATED, "paused_capacity"),
        (Reason.QUOTA_EXCEEDED, "paused_capacity"),
        (Reason.NAMESPACE_QUOTA_EXCEEDED, "paused_capacity"),
        (Reason.PROVISIONING, "active"),
        (Reason.IMAGE_PULL_BACK_OFF, "active"),
    ],
)
def test_a_starting_session_reports_why_it_is_not_ready(
    reason: Reason, queue_state: QueueState
) -> None:
    on_its_way = a_condition(ConditionType.READY, "False", reason, "4 GPUs missing")

    state = readiness(a_session(on_its_way))

    assert state == Pending(queue_state, f"TrainingSession one: {reason}: 4 GPUs missing")


@pytest.mark.parametrize("reason", sorted(NEVER_FITS))
def test_a_session_that_can_never_fit_has_ended(reason: Reason) -> None:
    stalled = a_condition(ConditionType.STALLED, "True", reason, "why")

    state = readiness(a_session(stalled))

    assert isinstance(state, Ended)
    assert isinstance(state.error, InvalidRequest | HeadFailed)
    clients_fault = {Reason.NOT_ALLOWED, Reason.BASE_MODEL_NOT_FOUND}
    assert (state.error.category == "user") == (reason in clients_fault)
    assert state.error.message == f"TrainingSession one: {reason}: why"


def test_a_stall_that_can_be_resolved_stays_pending() -> None:
    crashing = [
        a_condition(kind, status, Reason.CRASH_LOOP, "exit 1")
        for kind, status in ((ConditionType.STALLED, "True"), (ConditionType.READY, "False"))
    ]

    assert isinstance(readiness(a_session(*crashing)), Pending)


@pytest.mark.parametrize(
    ("ran", "expected_state"), [({}, Ended), ({"incarnation": "pod.0"}, Pending)]
)
def test_a_failed_first_start_is_reported_and_a_run_that_can_be_resumed_waits(
    ran: dict[str, Any], expected_state: type
) -> None:
    failed = a_condition(ConditionType.READY, "False", Reason.START_FAILED, "no such image")

    state = readiness(a_session(failed, **ran))

    message = state.error.message if isinstance(state, Ended) else getattr(state, "reason", "")
    assert isinstance(state, expected_state)
    assert message == "TrainingSession one: StartFailed: no such image"


def test_a_deleted_or_expired_session_has_ended() -> None:
    deleted = replace(a_session(READY, **SERVING), is_deleted=True)
    expired = a_session(a_condition(ConditionType.READY, "False", Reason.LIFETIME_EXCEEDED))

    states = [readiness(deleted), readiness(expired)]

    assert all(isinstance(state, Ended) for state in states)
    assert all(isinstance(state.error, StateLost) for state in states if isinstance(state, Ended))


def test_a_session_that_is_deleted_ends_and_one_that_expired_is_over() -> None:
    deleted = replace(a_session(READY, **SERVING), is_deleted=True)
    reason = a_condition(ConditionType.READY, "False", Reason.LIFETIME_EXCEEDED, "after 1 h")
    failed = a_condition(ConditionType.READY, "False", Reason.START_FAILED)

    ends = [head_end(each) for each in (deleted, a_session(reason), a_session(failed))]

    assert ends == [
        HeadEnd(False, "TrainingSession one is being deleted: its head saves a last checkpoint"),
        HeadEnd(True, "TrainingSession one has ended: after 1 h"),
        None,
    ]


def test_a_session_that_is_deleted_before_it_ran_has_nothing_to_save() -> None:
    queued = a_session(a_condition(ConditionType.READY, "False", Reason.QUEUED))

    end = head_end(replace(queued, is_deleted=True))

    assert end == HeadEnd(
        False, "TrainingSession one is being deleted: it never ran", has_run=False
    )


def test_a_suspension_by_the_owner_is_reported_and_not_overridden() -> None:
    idle = a_condition(ConditionType.SUSPENDED, "True", Reason.IDLE)

    session = a_session(READY, idle, suspend=True, **SERVING)

    assert readiness(session) == Pending(
        "active",
        "TrainingSession one is suspended by its owner: set spec.suspend to false to resume it",
    )
    assert idle_since(session) is None


def test_only_a_session_suspended_for_idleness_is_idle() -> None:
    idle = a_session(a_condition(ConditionType.SUSPENDED, "True", Reason.IDLE))
    running = a_session(a_condition(ConditionType.SUSPENDED, "False", Reason.RUNNING))

    assert idle_since(idle) == parse_time("2026-01-02T00:00:00Z")
    assert idle_since(running) is None


BASE_MODEL = {
    "metadata": {"name": "tiny", "resourceVersion": "1"},
    "spec": {
        "modelName": "tiny/llama",
        "source": {"hub": "tiny/llama"},
        "maxContextLength": 512,
        "head": {"image": "head"},
    },
}


def test_a_base_model_is_offered_unless_it_is_known_not_to_be_ready() -> None:
    broken = a_condition(ConditionType.READY, "False", Reason.NEVER_FITS)

    assert read_base_model(BASE_MODEL).is_offered
    assert not read_base_model({**BASE_MODEL, "status": {"conditions": [broken]}}).is_offered


def a_run_in_a_pool(*conditions: dict[str, Any], **status: Any) -> TrainingSessionView:
    run = a_session(*conditions, **status)
    spec = {"sharing": "Shared", "pool_cluster": "pool-a"}
    return replace(run, spec=run.spec.model_copy(update=spec))


def a_pool_cluster(*conditions: dict[str, Any], **status: Any) -> TrainingSessionView:
    cluster = replace(a_session(*conditions, **status), name="pool-a")
    return replace(cluster, spec=cluster.spec.model_copy(update={"role": "Pool"}))


def test_a_run_in_a_pool_has_the_endpoint_of_its_cluster_whatever_its_own_status_says() -> None:
    cluster = a_pool_cluster(READY, endpoint="http://pool:8000", incarnation="pool.1")

    state = readiness(a_run_in_a_pool(READY, **SERVING), cluster)

    assert state == Ready("http://pool:8000", "pool.1")


def test_a_run_whose_cluster_is_gone_has_no_endpoint_although_its_status_still_has_one() -> None:
    assert isinstance(readiness(a_run_in_a_pool(READY, **SERVING)), Pending)


def test_a_run_that_is_being_moved_says_from_where_to_where() -> None:
    cluster, run = a_pool_cluster(READY, **SERVING), a_run_in_a_pool(READY)

    moved, returning = (readiness(replace(run, moving_to=to), cluster) for to in ("b", "pool-a"))

    assert moved == Pending(
        "active", "TrainingSession one is being moved from pool cluster pool-a to b"
    )
    assert returning == Pending("active", "TrainingSession one returns to pool cluster pool-a")


def test_a_run_waits_that_the_memory_of_its_cluster_has_no_room_for() -> None:
    words = "the memory of pool cluster pool-a has no room"
    waits = a_condition(ConditionType.READY, "False", Reason.POOL_FULL, words)
    earlier = waits | {"observedGeneration": 1}
    cluster = a_pool_cluster(READY, **SERVING)

    assert readiness(a_run_in_a_pool(waits), cluster) == Pending(
        "paused_capacity", f"TrainingSession one: PoolFull: {words}"
    )
    # It was written before the run was placed here.
    assert isinstance(readiness(a_run_in_a_pool(earlier), cluster), Ready)


def test_a_run_does_not_end_with_its_cluster() -> None:
    ended = replace(a_pool_cluster(READY, **SERVING), is_deleted=True)
    words = "could not suspend run-of-another-owner:train:0"
    waits = a_condition(ConditionType.READY, "False", Reason.SAVE_FAILED, words)

    assert readiness(a_run_in_a_pool(READY), ended) == Pending(
        "paused_capacity",
        "TrainingSession one is on pool cluster pool-a: TrainingSession pool-a has ended",
    )
    assert readiness(a_run_in_a_pool(READY), a_pool_cluster(waits)) == Pending(
        "active",
        "TrainingSession one is on pool cluster pool-a: TrainingSession pool-a: SaveFailed",
    )


def test_a_deleted_run_has_ended_although_its_cluster_serves() -> None:
    deleted = replace(a_run_in_a_pool(READY), is_deleted=True)

    state = readiness(deleted, a_pool_cluster(READY, **SERVING))

    assert isinstance(state, Ended)
    assert isinstance(state.error, StateLost)


def test_clients_wait_while_the_head_of_a_pool_saves_and_drops_an_ended_run() -> None:
    leaving = a_run_in_a_pool(a_condition(ConditionType.READY, "False", Reason.SUSPENDING, "old"))

    assert readiness(leaving, a_pool_cluster(READY, **SERVING)) == Pending(
        "active", "TrainingSession one: Suspending: old"
    )
