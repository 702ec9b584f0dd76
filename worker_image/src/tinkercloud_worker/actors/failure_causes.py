"""What went wrong at the ranks of a group."""

from collections.abc import Sequence
from typing import Any

import ray
import structlog
from ray.exceptions import RayActorError, RayError

from tinkercloud_worker.actors.rank import RankAnswer

log = structlog.get_logger(__name__)

_ROOT_CAUSE_SECONDS = 2.0
"""How long to wait for further failures, to find the root cause: a rank that waits for a dying rank
may fail before that death is reported."""


def answers_and_failures(refs: Sequence[Any]) -> tuple[dict[int, RankAnswer], dict[int, RayError]]:
    """Wait for all ranks; return the answers and the failures, by rank."""
    answers: dict[int, RankAnswer] = {}
    failures: dict[int, RayError] = {}
    for rank, ref in enumerate(refs):
        try:
            answers[rank] = ray.get(ref)
        except RayError as error:
            log.exception("a rank failed")
            failures[rank] = error
    return answers, failures


def cause(refs: Sequence[Any], rank: int, first: RayError) -> tuple[int, RayError]:
    """Return the rank that caused a failure, and its error: preferably one whose process died.

    Args:
        refs: references to the results of all ranks.
        rank: the rank whose failure was noticed first.
        first: that failure.
    """
    if isinstance(first, RayActorError):
        # NCCL's watchdog may end ranks that wait for it at about the same time.
        return rank, first
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_ROOT_CAUSE_SECONDS)
    # Of a method that yields, the end does not show what was raised, except if the process ended.
    failures = [(rank, first)]
    for ref in done:
        try:
            ray.get(ref)
        except RayError as error:
            failures.append((refs.index(ref), error))
    return min(failures, key=lambda failure: not isinstance(failure[1], RayActorError))


def reason(error: RayError) -> str:
    """Return what a rank raised, or that its process ended, in a line."""
    if isinstance(error, RayActorError):
        return "its process ended"
    cause = getattr(error, "cause", None) or error
    last_line = str(cause).strip().rpartition("\n")[2]
    return f"{type(cause).__name__}: {last_line}"
