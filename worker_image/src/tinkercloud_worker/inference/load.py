"""How many engines a load needs: pure.

More engines are needed once the lowest load of the last `up_seconds` needs them, fewer only when
the highest load of a longer while does not. So a burst that is shorter than the first starts
nothing, and a pause that is shorter than the second removes nothing.
"""

import math
from collections import deque

from tinkercloud_protocol.heads.engine_scaling_settings import EngineScaling


class LoadHistory:
    """The recent load of a head: its samples in progress, waiting ones included.

    Times are seconds of any clock that does not go back.
    """

    def __init__(self, scaling: EngineScaling, max_engines: int) -> None:
        self._scaling = scaling
        self._max_engines = max_engines
        self._levels: deque[tuple[float, int]] = deque()
        """Time and samples in progress of each observation, oldest first."""
        self._start: float | None = None
        """When observation began."""

    def note(self, now: float, samples: int) -> None:
        """Record the samples in progress."""
        if self._start is None:
            self._start = now
        self._levels.append((now, samples))
        kept = max(self._scaling.up_seconds, self._scaling.down_seconds)
        # The last level before the window is the level at its start.
        while len(self._levels) > 1 and self._levels[1][0] <= now - kept:
            self._levels.popleft()

    def needed(self, now: float, engines: int) -> int:
        """Return how many engines the load needs, if there are `engines` of them."""
        least = min(self._within(now, self._scaling.up_seconds), default=0)
        most = max(self._within(now, self._scaling.down_seconds), default=None)
        number = max(engines, self._engines_for(least))
        if most is not None:
            # The last observation is in both spans, so this is not less than the least load needs.
            number = min(number, self._engines_for(most))
        return min(max(number, self._scaling.min_engines), self._max_engines)

    def _within(self, now: float, seconds: float) -> list[int]:
        """Return the levels of the last seconds; none if observation began later than that."""
        begin = now - seconds
        if self._start is None or self._start > begin:
            return []
        found: list[int] = []
        for moment, samples in reversed(self._levels):
            found.append(samples)
            if moment <= begin:
                break
        return found

    def _engines_for(self, samples: int) -> int:
        return math.ceil(samples / self._scaling.target_samples)
