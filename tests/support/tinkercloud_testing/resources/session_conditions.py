"""Invariants of the conditions of every session."""

from tinkercloud_crds.conditions import SESSION_STEPS, ConditionType, find
from tinkercloud_crds.training_session import TrainingSessionStatus


def reached(status: TrainingSessionStatus) -> list[bool]:
    """Return which of the steps to Ready are reached."""
    found = [find(status.conditions, step) for step in SESSION_STEPS]
    return [condition is not None and condition.status == "True" for condition in found]


def is_true(status: TrainingSessionStatus, kind: ConditionType) -> bool:
    """Return whether a condition exists and is True."""
    condition = find(status.conditions, kind)
    return condition is not None and condition.status == "True"


def check_conditions(before: TrainingSessionStatus, after: TrainingSessionStatus) -> None:
    """Check the invariants of every written status and of every change."""
    steps = reached(after)
    assert steps == sorted(steps, reverse=True), "conditions that are True come first"
    assert is_true(after, ConditionType.READY) == all(steps)
    assert not (is_true(after, ConditionType.READY) and is_true(after, ConditionType.STALLED))
    assert (after.endpoint is not None) == all(steps)
    for condition in after.conditions:
        earlier = find(before.conditions, ConditionType(condition.type))
        if earlier is not None:
            has_moved = condition.last_transition_time != earlier.last_transition_time
            assert condition.status != earlier.status or not has_moved
