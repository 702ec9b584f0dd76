"""When a model is saved automatically: a state machine without clock, I/O or tasks.

Times are seconds of one monotonic clock. A save covers the changes that were counted before the
state was copied. A change that is counted later may be in the copy already; it is then saved twice,
never too seldom.
"""

from dataclasses import dataclass

from tinkercloud_protocol.heads.autosave import AutosaveConfig
from tinkercloud_protocol.heads.durability_settings import DurabilityConfig
from tinkercloud_protocol.requests.hyperparameters import LoraConfig

_FIRST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0
"""First and longest pause after a failed save; each failure doubles it."""
_WHOLE_MODEL_SHARE = 0.05
"""Share of the time that snapshots of a whole model may take."""


@dataclass(frozen=True, slots=True)
class SavePoint:
    """The moment before a state is copied."""

    changes: int
    """Number of changes that the copy will have."""
    time: float


class Backoff:
    """When something that fails is tried again."""

    def __init__(self) -> None:
        self._failures = 0
        self.retry_at = 0.0
        """When to try again; in the past if nothing has failed."""

    def failed(self, now: float, took: float = 0.0) -> None:
        """Record a failure of an attempt that took so many seconds: the pause is no shorter."""
        pause = min(_FIRST_RETRY_SECONDS * 2.0**self._failures, _LONGEST_RETRY_SECONDS)
        self._failures += 1
        self.retry_at = now + max(pause, took)

    def succeeded(self) -> None:
        """Record a success."""
        self._failures, self.retry_at = 0, 0.0


class SaveSchedule:
    """Counts one model's changes and decides when they are saved."""

    def __init__(self, config: AutosaveConfig, share: float = 1.0) -> None:
        """Start without changes.

        Args:
            config: when changes are saved.
            share: share of the time that saves may take, up to 1; beyond it they come later.
        """
        self._config = config
        self._share = share
        self.rested_at = 0.0
        """When the next save may begin, so that saves take no more than their share."""
        self._changes = 0
        self._saved = 0
        self._since = 0.0
        """When the oldest unsaved change was counted, or earlier."""
        self._backoff = Backoff()
        self._has_ended = False
        self.failure: str | None = None
        """Why the last save failed; None if it succeeded."""

    @property
    def unsaved(self) -> int:
        """Number of changes that no save covers."""
        return self._changes - self._saved

    def changed(self, now: float, count: int = 1) -> None:
        """Count changes, such as an optimizer step."""
        if self.unsaved == 0:
            self._since = now
        self._changes += count

    def begin(self, now: float) -> SavePoint:
        """Return the point that a state is saved from; call it before the state is copied."""
        return SavePoint(self._changes, now)

    def saved(self, point: SavePoint) -> None:
        """Record that the state copied after this point is stored."""
        self._backoff.succeeded()
        self.failure = None
        if point.changes > self._saved:
            self._saved, self._since = point.changes, point.time

    def rest(self, began: float, now: float) -> None:
        """Record how long a save took."""
        self.rested_at = began + (now - began) / self._share

    def failed(self, now: float, reason: str) -> None:
        """Record that a save failed."""
        self.failure = reason
        self._backoff.failed(now)

    def end(self) -> None:
        """Save nothing from now on."""
        self._has_ended = True

    def due_at(self) -> float | None:
        """Return when the next save is due; None if none is due until the model changes."""
        if self.unsaved == 0 or self._has_ended:
            return None
        earliest = max(self._backoff.retry_at, self.rested_at)
        if self._config.steps and self.unsaved >= self._config.steps:
            return max(self._since, earliest)
        if self._config.seconds:
            return max(self._since + self._config.seconds, earliest)
        return None


class SnapshotSchedule(SaveSchedule):
    """Counts the changes of a model that has a journal, and decides when a snapshot is taken."""

    def __init__(
        self, config: DurabilityConfig, lora: LoraConfig | None, *, is_wanted: bool
    ) -> None:
        """Start without changes.

        Args:
            config: when to take snapshots while the journal is small.
            lora: the model's adapter; None for a whole model.
            is_wanted: whether a snapshot is needed as soon as possible.
        """
        self._is_whole = lora is None
        if lora is None:
            seconds = config.whole_model_seconds
            super().__init__(AutosaveConfig(steps=0, seconds=seconds), _WHOLE_MODEL_SHARE)
        else:
            steps, seconds = config.snapshot_steps, config.snapshot_seconds
            super().__init__(AutosaveConfig(steps=steps, seconds=seconds))
        self.is_wanted = is_wanted
        """Whether a snapshot is needed as soon as possible: what a request had read may change."""
        self.retry = Backoff()
        """When an attempt may begin, after failures of the disk."""
        self._copy_retry = Backoff()
        self._lacks_copy = False
        """Whether the object store lacks the last snapshot."""
        self._counted = 0

    def count(self, now: float, changes: int) -> None:
        """Count the changes since the last call, from the number of all changes of the model."""
        if changes > self._counted:
            self.changed(now, changes - self._counted)
            self._counted = changes

    def next_at(self, *, is_urgent: bool, needs_copy: bool, has_gradient: bool) -> float | None:
        """Return when the next snapshot is due; None if none is.

        Args:
            is_urgent: whether the journal is too large, or can't be written.
            needs_copy: whether the copied journal needs a snapshot to continue from.
            has_gradient: whether a step is not complete. After it there is no gradient, which would
                be copied with a whole model.
        """
        if is_urgent or self.is_wanted:
            return self.retry.retry_at
        if needs_copy or self._lacks_copy:
            return max(self.retry.retry_at, self._copy_retry.retry_at)
        due = self.due_at()
        if due is None or (self._is_whole and has_gradient):
            return None
        return max(due, self.retry.retry_at)

    def attempt_failed(self, began: float, now: float, reason: str) -> None:
        """Record that an attempt to take or write a snapshot failed."""
        self.failed(now, reason)
        self.rest(began, now)
        self.retry.failed(now, self.rested_at - now)

    def copied(self) -> None:
        """Record that the object store has the last snapshot."""
        self._lacks_copy = False
        self._copy_retry.succeeded()

    def copy_failed(self, began: float, now: float) -> None:
        """Record that the last snapshot could not be copied to the object store."""
        self._lacks_copy = True
        self._copy_retry.failed(now, now - began)
