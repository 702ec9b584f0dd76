"""Since when problems are there that have no time of their own."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from tinkercloud_protocol.responses.problems import Problem

_FORGOTTEN_AFTER = timedelta(hours=1)


class FirstSeen:
    """When this server first found each problem. Belongs to one event loop.

    A problem that nobody has asked for during an hour counts as a new one.
    """

    def __init__(self) -> None:
        """Create it without problems."""
        self._times: dict[tuple[str, str, str, str], tuple[datetime, datetime]] = {}
        """When each was found first and last."""

    def dated(self, found: Iterable[Problem], moment: datetime) -> list[Problem]:
        """Return problems with the time since which they are there, the newest first."""
        times = self._times.items()
        self._times = {key: each for key, each in times if moment - each[1] < _FORGOTTEN_AFTER}
        return sorted(
            (self._dated(each, moment) for each in found),
            key=lambda each: each.since or moment,
            reverse=True,
        )

    def _dated(self, problem: Problem, moment: datetime) -> Problem:
        if problem.since is not None:
            return problem.model_copy(update={"since": problem.since.astimezone(UTC)})
        # The reason may contain numbers that change.
        key = problem.kind, problem.subject, problem.cause, problem.remedy
        first, _ = self._times.get(key, (moment, moment))
        self._times[key] = first, moment
        return problem.model_copy(update={"since": first})
