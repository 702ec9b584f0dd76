"""Limits the tokens per minute of each owner. The API server sends the limits with its requests.

A request starts while its owner's bucket is not empty, and takes its tokens out of it, which may
leave a debt: so a request of any size runs, and on average no more than the limit. A sample takes
the most it may need, and returns what it did not use. The bucket holds the tokens of one minute.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tinkercloud_protocol.heads.owner_limits import TOKENS_PER_MINUTE, OwnerLimits

_MINUTE = 60.0


@dataclass(slots=True)
class TokenBucket:
    """The tokens that an owner may use now. Pure; times are of one clock, in seconds."""

    per_minute: int
    level: float
    """Tokens at the time `updated`; negative for a debt."""
    updated: float

    def refill(self, now: float) -> None:
        """Add the tokens of the time that has passed."""
        gained = (now - self.updated) * self.per_minute / _MINUTE
        self.level = min(float(self.per_minute), self.level + gained)
        self.updated = now

    def take(self, tokens: int, now: float) -> None:
        """Take tokens out; a negative number returns some."""
        self.refill(now)
        self.level = min(float(self.per_minute), self.level - tokens)

    def seconds_to_wait(self, now: float) -> float:
        """Return the seconds until a request may start; 0 if one may start now."""
        self.refill(now)
        # A whole token, so that rounding never lets a timer fire too early.
        return max(0.0, (1.0 - self.level) * _MINUTE / self.per_minute)


class TokenLimits:
    """The token buckets of a head's owners. Belongs to one event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start without limits.

        Args:
            now: a monotonic clock, in seconds.
        """
        self._now = now
        self._tenants: dict[str, str] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._has_room: dict[str, asyncio.Event] = {}
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, on_room: Callable[[str], None]) -> None:
        """Call a function with each owner whose requests no longer wait."""
        self._listeners.append(on_room)

    def set(self, limits: OwnerLimits) -> None:
        """Set the limits of an owner, which may have changed."""
        owner, bucket = limits.owner, self._buckets.get(limits.owner)
        if limits.tokens_per_minute is None:
            if self._buckets.pop(owner, None) is not None:
                self._notify(owner)
            return
        self._tenants[owner] = limits.tenant or owner
        if bucket is None:
            rate = limits.tokens_per_minute
            self._buckets[owner] = TokenBucket(rate, float(rate), self._now())
        elif bucket.per_minute != limits.tokens_per_minute:
            bucket.refill(self._now())
            bucket.per_minute = limits.tokens_per_minute
            self._watch(owner)

    def spend(self, owner: str, tokens: int) -> None:
        """Take the tokens of a request that starts; a negative number returns some."""
        bucket = self._buckets.get(owner)
        if bucket is not None:
            bucket.take(tokens, self._now())
            self._watch(owner)

    def has_room(self, owner: str) -> bool:
        """Whether an owner's next request may start."""
        return self._seconds(owner) == 0.0

    def is_used_up(self, owner: str) -> bool:
        """Whether an owner's next request has to wait. May be called on any thread.

        It reads what the event loop has found last, and leaves the buckets alone.
        """
        return owner in self._buckets and owner in self._timers

    def why_waiting(self, owner: str) -> str | None:
        """Return why an owner's requests wait, and how long; None if they may start."""
        seconds = self._seconds(owner)
        if seconds == 0.0:
            return None
        return (
            f"owner {owner!r} has used the tokens of this minute ({TOKENS_PER_MINUTE} of tenant"
            f" {self._tenants[owner]!r} is {self._buckets[owner].per_minute}); the next request"
            f" starts in {seconds:.0f} s"
        )

    async def turn(self, owner: str, tokens: int) -> float:
        """Wait until a request of an owner may start, after those that asked before; spend.

        Returns:
            Seconds that it had to wait; 0 if it could start at once.
        """
        if owner not in self._buckets:
            return 0.0
        began, turn = self._now(), self._turns.setdefault(owner, asyncio.Lock())
        is_free = self.has_room(owner) and not turn.locked()
        async with turn:
            while not self.has_room(owner):
                event = self._has_room.setdefault(owner, asyncio.Event())
                event.clear()
                await event.wait()
            self.spend(owner, tokens)
        return 0.0 if is_free else self._now() - began

    def _seconds(self, owner: str) -> float:
        bucket = self._buckets.get(owner)
        return bucket.seconds_to_wait(self._now()) if bucket is not None else 0.0

    def _watch(self, owner: str) -> None:
        """Notify when the owner's next request may start, now or later."""
        if (timer := self._timers.pop(owner, None)) is not None:
            timer.cancel()
        seconds = self._seconds(owner)
        if seconds == 0.0:
            self._notify(owner)
            return
        loop = asyncio.get_running_loop()
        self._timers[owner] = loop.call_later(seconds, self._watch, owner)

    def _notify(self, owner: str) -> None:
        if (event := self._has_room.get(owner)) is not None:
            event.set()
        for listener in self._listeners:
            listener(owner)
