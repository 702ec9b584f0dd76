"""What a head has computed, by hour and by who uses it.

The counts of an hour only grow, so a report of them may be repeated or lost: the next one includes
everything. Tokens are counted when a request has completed, seconds as they are computed.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

_HOUR_SECONDS = 3600
_BUCKET_SECONDS = 10
_RECENT_BUCKETS = 6
"""Complete buckets of tokens by time from which a model's rate is computed."""
_KEPT_HOURS = 48
"""Hours that are remembered, so that a server which was away can still read them."""


@dataclass(frozen=True, slots=True)
class Payer:
    """Who uses the head, and for what."""

    owner: str
    session_id: str
    """The SDK session that sent the request."""
    model_id: str
    """The model, or the run that the sampled checkpoint belongs to; empty for the base model."""

    @classmethod
    def of_model(cls, owner: str, model_id: str) -> "Payer":
        """Return who pays for the training of a model."""
        return cls(owner, model_id.partition(":")[0], model_id)


NOBODY = Payer("", "", "")
"""Pays for what the head computes for itself, which is not counted."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Amounts of work."""

    trained_tokens: int = 0
    """Tokens of requests that added to a gradient."""
    forward_tokens: int = 0
    """Tokens of forward-only requests."""
    prefill_tokens: int = 0
    """Tokens of prompts that were computed."""
    cached_tokens: int = 0
    """Tokens of prompts that were found in a cache."""
    sampled_tokens: int = 0
    engine_seconds: float = 0.0
    """Seconds of the thread that computes."""

    @property
    def computed_tokens(self) -> int:
        """Number of tokens that were computed, of any kind."""
        return self.trained_tokens + self.forward_tokens + self.prefill_tokens + self.sampled_tokens

    def __add__(self, other: "Usage") -> "Usage":
        """Return the sum."""
        return Usage(
            self.trained_tokens + other.trained_tokens,
            self.forward_tokens + other.forward_tokens,
            self.prefill_tokens + other.prefill_tokens,
            self.cached_tokens + other.cached_tokens,
            self.sampled_tokens + other.sampled_tokens,
            self.engine_seconds + other.engine_seconds,
        )


@dataclass(frozen=True, slots=True)
class HourOfUsage:
    """What somebody has used in an hour, up to now."""

    hour: int
    """Hours from 1970-01-01 in UTC to its start."""
    payer: Payer
    usage: Usage


def _ignore_wait(_owner: str, _seconds: float, _started: int) -> None:
    """Count nothing."""


class UsageMeter:
    """Counts usage. Thread-safe."""

    def __init__(
        self,
        now: Callable[[], float] = time.time,
        on_wait: Callable[[str, float, int], None] = _ignore_wait,
    ) -> None:
        """Create a meter.

        Args:
            now: the time, in seconds since 1970 in UTC.
            on_wait: called on the engine's thread when jobs get their turn, with their owner, the
                seconds that they have waited for the engine, and how many of them start now.
        """
        self.on_wait = on_wait
        self._now = now
        self._lock = threading.Lock()
        self._counts: dict[tuple[int, Payer], tuple[int, Usage]] = {}
        """Each count, with the revision in which it last changed, in the order of revisions."""
        self._recent: dict[int, Counter[str]] = {}
        """Tokens of the last minute by model, in buckets of `_BUCKET_SECONDS`."""
        self._revision = 0
        self._hour = 0
        """The hour of the last count."""
        self._listeners: list[Callable[[], None]] = []

    def count(self, payer: Payer, usage: Usage) -> None:
        """Count a completed request, and notify those who listen."""
        with self._lock:
            self._add(payer, usage)
            self._bucket()[payer.model_id] += usage.computed_tokens
            listeners = list(self._listeners)
        for notify in listeners:
            notify()

    def count_seconds(self, tokens: Mapping[Payer, int], seconds: float) -> None:
        """Count time of the engine, divided by the tokens that were computed for each.

        Nobody is notified: this may happen at every decoding step.
        """
        total = sum(tokens.values())
        if total == 0:
            return
        with self._lock:
            for payer, share in tokens.items():
                self._add(payer, Usage(engine_seconds=seconds * share / total))

    def _add(self, payer: Payer, usage: Usage) -> None:
        if payer == NOBODY:
            return
        hour = int(self._now() // _HOUR_SECONDS)
        if hour != self._hour:
            self._hour = hour
            self._forget_before(hour - _KEPT_HOURS)
        self._revision += 1
        _, known = self._counts.pop((hour, payer), (0, Usage()))
        self._counts[hour, payer] = (self._revision, known + usage)

    def tokens_per_minute(self, model_id: str) -> float:
        """Return how many tokens of a model were computed in the last minute."""
        with self._lock:
            self._bucket()
            tokens = sum(bucket[model_id] for bucket in self._recent.values())
            seconds = _RECENT_BUCKETS * _BUCKET_SECONDS + self._now() % _BUCKET_SECONDS
            return tokens * 60 / seconds

    def _bucket(self) -> "Counter[str]":
        """Return the tokens of the current seconds; forget those of more than a minute ago."""
        current = int(self._now() // _BUCKET_SECONDS)
        for number in [n for n in self._recent if not current - _RECENT_BUCKETS <= n <= current]:
            del self._recent[number]
        return self._recent.setdefault(current, Counter())

    def _forget_before(self, hour: int) -> None:
        for key in [key for key in self._counts if key[0] < hour]:
            del self._counts[key]

    def changes(self, since: int) -> tuple[int, list[HourOfUsage]]:
        """Return the current revision, and the counts that have changed since another, latest last.

        Args:
            since: a revision that was returned earlier; 0 for all counts that are remembered.
        """
        with self._lock:
            latest = takewhile(lambda item: item[1][0] > since, reversed(self._counts.items()))
            counts = [HourOfUsage(hour, payer, usage) for (hour, payer), (_, usage) in latest]
            return self._revision, counts[::-1]

    @contextmanager
    def notifying(self, notify: Callable[[], None]) -> Iterator[None]:
        """Call a function at every completed request, on its thread, until the context ends."""
        with self._lock:
            self._listeners.append(notify)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(notify)
