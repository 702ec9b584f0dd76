"""When a session is suspended, finished or deleted automatically, to the second."""

from datetime import timedelta
from typing import Any

import pytest

from tinkercloud_crds.conditions import Condition, ConditionType, Reason, timestamp
from tinkercloud_crds.pods.shapes import Idle
from tinkercloud_crds.times import parse_time
from tinkercloud_operator.decide.session.lifetime import Decision, DesiredState, decide, last_use
from tinkercloud_operator.spec.observed import Observed
from tinkercloud_testing.resources.sessions import NOON, a_pod, a_session, a_status, observed

HOUR = Idle(timeout_seconds=3600)
DELETED_AFTER_AN_HOUR = Idle(timeout_seconds=3600, action="Delete")


def at(seconds: float, **fields: Any) -> Observed:
    """Return a session, created and accepted at noon, observed some seconds later."""
    values: dict[str, Any] = {"status": a_status([since(ConditionType.ACCEPTED, "True", 0)])}
    return observed(**values | fields, now=NOON + timedelta(seconds=seconds))


CREATED_FOR_A_CLIENT: dict[str, Any] = {"is_declared": False}
HAS_RUN = a_status([], incarnation="uid-0")


def since(kind: ConditionType, status: Any, seconds: float, reason: str = "Any") -> Condition:
    moment = timestamp(NOON + timedelta(seconds=seconds))
    return Condition(type=kind, status=status, reason=reason, last_transition_time=moment)


def ended(seconds: float) -> Any:
    return a_status(finished_time=timestamp(NOON + timedelta(seconds=seconds)))


def after(seconds: float) -> Any:
    return NOON + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("seconds", "idle", "wanted"),
    [
        (3599.999, HOUR, DesiredState.RUNNING),
        (3600, HOUR, DesiredState.SUSPENDED),
        (3599.999, DELETED_AFTER_AN_HOUR, DesiredState.RUNNING),
        (3600, DELETED_AFTER_AN_HOUR, DesiredState.DELETED),
    ],
)
def test_a_session_becomes_idle_exactly_at_its_timeout(
    seconds: float, idle: Idle, wanted: DesiredState
) -> None:
    accepted = since(ConditionType.ACCEPTED, "True", 0)
    status = a_status([accepted], incarnation="uid-0")

    decision = decide(at(seconds, status=status, is_declared=False), idle, None)

    assert decision.desired is wanted


@pytest.mark.parametrize("seconds", [3600, 10**8])
def test_a_declared_session_with_idle_action_delete_is_finished_instead(
    seconds: float,
) -> None:
    decision = decide(at(seconds), DELETED_AFTER_AN_HOUR, None)

    assert (decision.desired, decision.reason) == (DesiredState.FINISHED, Reason.IDLE)


@pytest.mark.parametrize("ttl", [0, 900])
def test_a_finished_declared_session_is_kept_forever(ttl: int) -> None:
    kept = a_session(ttlSecondsAfterFinished=ttl)

    decision = decide(at(10**8, spec=kept, status=ended(1000)), HOUR, 600)

    assert decision.desired is DesiredState.FINISHED
    assert decision.changes_at is None


@pytest.mark.parametrize(
    ("seconds", "wanted"), [(1099.999, DesiredState.RUNNING), (1100, DesiredState.DELETED)]
)
@pytest.mark.parametrize("status", ["False", "Unknown", "True"])
def test_a_session_whose_client_stopped_polling_before_it_ran_is_deleted(
    seconds: float, wanted: DesiredState, status: str
) -> None:
    waits = a_status([since(ConditionType.ACCEPTED, status, 0, Reason.QUOTA_EXCEEDED)])
    session = at(seconds, **CREATED_FOR_A_CLIENT, status=waits, last_activity=after(500))

    assert decide(session, HOUR, None).desired is wanted


def test_a_decision_changes_when_the_client_counts_as_gone() -> None:
    session = at(550, **CREATED_FOR_A_CLIENT, status=QUEUED, last_activity=after(500))

    assert decide(session, HOUR, None).changes_at == after(1100)
    assert decide(session, HOUR, 700).changes_at == after(700)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        CREATED_FOR_A_CLIENT | {"status": HAS_RUN},
        CREATED_FOR_A_CLIENT | {"pods": (a_pod(),)},
        CREATED_FOR_A_CLIENT | {"spec": a_session(suspend=True)},
    ],
    ids=["declared", "it ran", "it runs", "suspended by its owner"],
)
def test_no_other_session_counts_as_abandoned(fields: dict[str, Any]) -> None:
    assert decide(at(10**5, **fields), None, None).desired is not DesiredState.DELETED


def test_the_decision_for_a_running_session_changes_when_it_becomes_idle() -> None:
    assert decide(at(10), HOUR, None) == Decision(
        DesiredState.RUNNING, Reason.RUNNING, "", changes_at=after(3600)
    )


@pytest.mark.parametrize(
    ("seconds", "wanted"), [(599.999, DesiredState.RUNNING), (600, DesiredState.FINISHED)]
)
def test_a_session_finishes_exactly_at_its_maximum_lifetime(
    seconds: float, wanted: DesiredState
) -> None:
    assert decide(at(seconds), HOUR, 600).desired is wanted


@pytest.mark.parametrize("idle", [HOUR, DELETED_AFTER_AN_HOUR])
def test_a_session_is_not_idle_until_the_reporting_delay_has_passed(idle: Idle) -> None:
    used = {"last_activity": after(1000)}

    assert decide(at(1000 + 3600 + 75, **used), idle, None).desired is DesiredState.RUNNING
    assert decide(at(1000 + 3600 + 90, **used), idle, None).desired is not DesiredState.RUNNING


def test_the_decision_changes_at_the_earlier_of_idle_timeout_and_lifetime() -> None:
    assert decide(at(0), HOUR, 600).changes_at == after(600)
    assert decide(at(0), HOUR, 7200).changes_at == after(3600)


@pytest.mark.parametrize(
    ("seconds", "wanted"), [(1899.999, DesiredState.FINISHED), (1900, DesiredState.DELETED)]
)
def test_a_finished_session_is_deleted_exactly_at_its_ttl(
    seconds: float, wanted: DesiredState
) -> None:
    kept = a_session(ttlSecondsAfterFinished=900)

    session = at(seconds, spec=kept, status=ended(1000), is_declared=False)

    assert decide(session, HOUR, None).desired is wanted


def test_a_finished_session_with_a_ttl_of_zero_is_deleted_at_once() -> None:
    kept = a_session(ttlSecondsAfterFinished=0)

    session = at(1000, spec=kept, status=ended(1000), is_declared=False)

    assert decide(session, HOUR, None).desired is DesiredState.DELETED


def test_a_finished_session_does_not_restart_when_it_is_used() -> None:
    session = at(2000, status=ended(1000), last_activity=after(1999))

    assert decide(session, HOUR, None).desired is DesiredState.FINISHED


def test_a_suspended_session_finishes_at_its_maximum_lifetime() -> None:
    suspended = a_session(suspend=True)

    assert decide(at(599, spec=suspended), HOUR, 600).changes_at == after(600)
    assert decide(at(600, spec=suspended), HOUR, 600).desired is DesiredState.FINISHED


def test_spec_suspend_suspends_a_session_in_use() -> None:
    session = at(10, spec=a_session(suspend=True), last_activity=after(10))

    decision = decide(session, HOUR, None)

    assert (decision.desired, decision.reason) == (DesiredState.SUSPENDED, Reason.SUSPENDED)


def test_clearing_spec_suspend_resumes_an_unused_session() -> None:
    suspended = since(ConditionType.SUSPENDED, "True", 100, Reason.SUSPENDED)

    decision = decide(at(86400, status=a_status([suspended])), HOUR, None)

    assert decision.desired is DesiredState.RUNNING


def test_an_idle_session_stays_suspended_until_it_is_used() -> None:
    idle = a_status([since(ConditionType.SUSPENDED, "True", 3600, Reason.IDLE)])

    untouched = decide(at(86400, status=idle), HOUR, None)
    used = decide(at(86400, status=idle, last_activity=after(86399)), HOUR, None)

    assert (untouched.desired, untouched.reason) == (DesiredState.SUSPENDED, Reason.IDLE)
    assert used.desired is DesiredState.RUNNING


def test_a_request_resumes_a_suspended_session_regardless_of_clock_skew() -> None:
    idle = a_status([since(ConditionType.SUSPENDED, "True", 3600, Reason.IDLE)])
    by_a_slow_clock = at(86400, status=idle, last_activity=after(86400 - 7200))

    assert decide(by_a_slow_clock, HOUR, None).desired is DesiredState.RUNNING


QUEUED = a_status([since(ConditionType.QUOTA_RESERVED, "False", 0, Reason.QUEUED)])
ADMITTED = since(ConditionType.QUOTA_RESERVED, "True", 90)


@pytest.mark.parametrize(
    ("conditions", "activity", "seconds"),
    [
        ([], None, 0),
        ([], 50, 50),
        ([], -50, 0),
        ([since(ConditionType.READY, "True", 70)], 50, 70),
        ([since(ConditionType.READY, "False", 70)], 50, 50),
        ([since(ConditionType.SUSPENDED, "False", 80)], 50, 80),
        ([since(ConditionType.SUSPENDED, "True", 80)], 50, 50),
        ([since(ConditionType.SUSPENDED, "True", 80)], 81, 1000),
        ([ADMITTED], 50, 90),
        ([ADMITTED, since(ConditionType.SUSPENDED, "True", 80)], 50, 50),
        ([ADMITTED, since(ConditionType.SUSPENDED, "Unknown", 95)], 50, 90),
        ([since(ConditionType.ACCEPTED, "False", 10)], 50, 1000),
        ([since(ConditionType.READY, "False", 5, Reason.LOADING)], 50, 1000),
    ],
    ids=[
        "the creation",
        "a request",
        "a request before its creation",
        "becoming ready",
        "not ceasing to be ready",
        "being resumed",
        "not being suspended",
        "now, if it is requested while suspended",
        "being admitted by a queue",
        "not an admission before it was suspended",
        "being admitted, although it has started to stop",
        "now, while it is rejected",
        "now, while its model is loading",
    ],
)
def test_the_last_use_is_the_latest_of(
    conditions: list[Condition], activity: float | None, seconds: float
) -> None:
    given = {condition.type for condition in conditions}
    accepted = [] if ConditionType.ACCEPTED in given else [since(ConditionType.ACCEPTED, "True", 0)]
    used = after(activity) if activity is not None else None

    session = at(1000, status=a_status([*accepted, *conditions]), last_activity=used)

    assert last_use(session) == after(seconds)


def test_a_queued_session_is_never_idle() -> None:
    decision = decide(at(10**6, status=QUEUED), HOUR, None)

    assert decision == Decision(DesiredState.RUNNING, Reason.RUNNING, "", changes_at=None)


def test_a_queued_session_finishes_at_its_maximum_lifetime() -> None:
    assert decide(at(599, status=QUEUED), HOUR, 600).changes_at == after(600)
    assert decide(at(600, status=QUEUED), HOUR, 600).desired is DesiredState.FINISHED


@pytest.mark.parametrize(
    ("suspended", "wanted"), [("False", DesiredState.RUNNING), ("True", DesiredState.SUSPENDED)]
)
def test_without_an_idle_policy_a_session_keeps_its_state(
    suspended: str, wanted: DesiredState
) -> None:
    status = a_status([since(ConditionType.SUSPENDED, suspended, 0, Reason.IDLE)])

    assert decide(at(10**9, status=status), None, None).desired is wanted


@pytest.mark.parametrize("text", [None, "", "soon", "2026-01-01", "2026-01-01T12:00:00"])
def test_text_that_is_not_a_timestamp_parses_to_none(text: str | None) -> None:
    assert parse_time(text) is None


def test_a_kubernetes_timestamp_is_parsed() -> None:
    assert parse_time("2026-01-01T12:00:00Z") == NOON
