"""Finds the conditions of sessions, pools and BaseModels that need somebody's attention."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tinkercloud_api.providers.base import FailingCondition
from tinkercloud_api.providers.cluster.session_status import BaseModelView, TrainingSessionView
from tinkercloud_crds.conditions import Condition
from tinkercloud_crds.remedies import REMEDIES
from tinkercloud_crds.times import parse_time
from tinkercloud_crds.training_session import SERVING_ROLES


def failing_conditions(
    sessions: Iterable[TrainingSessionView], base_models: Iterable[BaseModelView]
) -> Iterator[FailingCondition]:
    """Yield the conditions that need attention, one for each reason of an object.

    Those of pool clusters and BaseModels have no owner: their messages may name runs of others.
    """
    for session in sessions:
        is_pool = session.spec.role in SERVING_ROLES
        current = [c for c in session.conditions if c.observed_generation == session.generation]
        for condition in _by_reason(current):
            yield FailingCondition(
                kind="pool" if is_pool else "session",
                name=session.name,
                owner=None if is_pool else session.spec.owner,
                model_id=session.spec.model_id,
                **_words(condition),
            )
    for model in base_models:
        for condition in _by_reason(model.conditions):
            yield FailingCondition(
                kind="model", name=model.name, owner=None, model_id=None, **_words(condition)
            )


def _by_reason(conditions: Sequence[Condition]) -> Iterator[Condition]:
    """Yield the first condition with each reason; Ready and Stalled repeat those of others."""
    seen = set[str]()
    for condition in conditions:
        if condition.reason in REMEDIES and condition.reason not in seen:
            seen.add(condition.reason)
            yield condition


def _words(condition: Condition) -> dict[str, Any]:
    reason = condition.reason
    why = f"{reason}: {condition.message}" if condition.message else reason
    since = parse_time(condition.last_transition_time)
    return {"reason": why, "remedy": REMEDIES[reason], "since": since}
