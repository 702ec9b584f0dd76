"""The order of one model's requests: a pure state machine, without clock, tasks or I/O.

The SDK numbers a model's requests 1, 2, 3, ... and sends several at once, so they arrive in any
order, more than once, and sometimes never. Requests run strictly by number, one at a time. A
repeated number with the same content is the same request; with other content it is an error.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from tinkercloud_protocol.wire.errors import InvalidRequest, Overloaded

MAX_AHEAD = 4096
"""Numbers a request may be ahead of the one that runs."""

_OTHER_CLIENT = (
    "If another process has continued this model, stop it or leave the model to it: only one can"
    " train it. `tinkercloud runs attach` prints the lines that continue it"
)


@dataclass(slots=True)
class Sequencer:
    """Which requests have arrived, which one is running, and which one is next."""

    max_queued_bytes: int
    next_seq_id: int = 1
    """The lowest number whose request has not finished."""
    is_running: bool = False
    """Whether the request `next_seq_id` is running."""
    gives_numbers: bool = False
    """Whether requests without a number were given one."""
    _waiting: dict[int, int] = field(default_factory=dict)
    """Numbers that have arrived and not started, with their sizes in bytes."""
    queued_bytes: int = 0
    """Size of all waiting requests, in bytes."""
    _handed_over_at: int = 0
    """Number from which on the last client that attached continued, if that is being repeated."""
    _digests: dict[int, bytes] = field(default_factory=dict)
    """Content digest of each number that is waiting, running, or whose result is kept."""

    def enqueue(self, seq_id: int, digest: bytes, size: int, elsewhere: int = 0) -> bool:
        """Add a request to the queue; return whether it is new.

        Args:
            seq_id: its number.
            digest: equal for equal content.
            size: bytes that it takes while it waits.
            elsewhere: bytes in other queues that count against the same limit.

        Raises:
            InvalidRequest: the number was used with other content, is in the past, or is too far
                ahead.
            Overloaded: the queue is full.
        """
        known = self._digests.get(seq_id)
        if known is not None:
            if known != digest:
                raise InvalidRequest(
                    f"seq_id {seq_id} was already used by a request with different content; give"
                    f" each request its own number{self._advice}. {_OTHER_CLIENT}"
                )
            return False
        lowest = self.lowest_seq_id
        if seq_id < lowest:
            raise InvalidRequest(
                f"seq_id {seq_id} is too low: the next request of this model has seq_id"
                f" {lowest}{self._advice}. {_OTHER_CLIENT}"
            )
        if seq_id > lowest + MAX_AHEAD:
            raise InvalidRequest(
                f"seq_id {seq_id} is too high: the next request of this model has seq_id"
                f" {lowest}, and numbers up to {lowest + MAX_AHEAD} are accepted"
            )
        # The next request is always accepted: otherwise a full queue would wait forever.
        waiting = self.queued_bytes + elsewhere
        if seq_id != self.next_seq_id and waiting + size > self.max_queued_bytes:
            raise Overloaded(
                f"{self.queued_bytes} bytes of requests are queued for this model, {elsewhere} for"
                f" other models of its owner, and limits.max_queued_bytes is"
                f" {self.max_queued_bytes}; wait for some results before sending more"
            )
        self.admit(seq_id, digest, size)
        return True

    @property
    def _advice(self) -> str:
        if not self.gives_numbers:
            return ""
        return (
            " (requests of this model that had no seq_id were given the next numbers: send a"
            " seq_id with all of its requests, or with none)"
        )

    @property
    def lowest_seq_id(self) -> int:
        """The lowest number that a new request may have."""
        return max(self.next_seq_id, self._handed_over_at)

    @property
    def free_seq_id(self) -> int:
        """The number after the highest one that is known."""
        return max(*self._waiting, 0, self.next_seq_id + self.is_running - 1) + 1

    def has(self, seq_id: int, digest: bytes) -> bool:
        """Return whether a number was used by a request with this content."""
        return self._digests.get(seq_id) == digest

    def admit(self, seq_id: int, digest: bytes, size: int) -> None:
        """Add a request that was accepted earlier, regardless of the limit."""
        self._waiting[seq_id] = size
        self.queued_bytes += size
        self._digests[seq_id] = digest

    def has_room_alone(self, size: int) -> bool:
        """Return whether a request of that size fits, if the owner's other queues are empty."""
        return self.queued_bytes + size <= self.max_queued_bytes

    @property
    def num_pending(self) -> int:
        """Number of requests that are waiting or running."""
        return len(self._waiting) + self.is_running

    def take(self) -> int | None:
        """Start the next request, if it has arrived and none is running; return its number."""
        if self.is_running or self.next_seq_id not in self._waiting:
            return None
        self.queued_bytes -= self._waiting.pop(self.next_seq_id)
        self.is_running = True
        return self.next_seq_id

    def finish(self) -> None:
        """Mark the running request as finished."""
        self.is_running = False
        self.next_seq_id += 1

    @property
    def is_stuck(self) -> bool:
        """Whether requests are waiting for one that has not arrived."""
        return not self.is_running and bool(self._waiting) and self.next_seq_id not in self._waiting

    @property
    def first_missing(self) -> int:
        """The lowest number that has not arrived."""
        seq_id = self.next_seq_id + self.is_running
        while seq_id in self._waiting:
            seq_id += 1
        return seq_id

    def skip_gap(self) -> list[int]:
        """Drop all requests behind a gap; return their numbers.

        The next number is the one after the last of them.
        """
        dropped = sorted(self._waiting)
        if dropped:
            self._waiting.clear()
            self.queued_bytes = 0
            self.next_seq_id = dropped[-1] + 1
        return dropped

    def hand_over(self) -> list[int]:
        """Let another client continue the order; return the numbers of the requests dropped for it.

        The former client may send its next request at any later time. All numbers that it can have
        reached are therefore left out, so that its request is refused as too low.
        """
        dropped = self.skip_gap()
        self.next_seq_id += MAX_AHEAD + 1
        return dropped

    def drop_before_hand_over(self) -> list[int]:
        """Drop what had waited in vain when another client attached, and return its numbers.

        A head that repeats a journal finds the hand-over as a jump of the numbers: no client is
        `MAX_AHEAD` ahead of itself.
        """
        numbers = sorted(self._waiting)
        order = [self.next_seq_id, *numbers]
        jumps = {after for before, after in pairwise(order) if after - before > MAX_AHEAD}
        self._handed_over_at = max(jumps, default=0)
        following, dropped = self.next_seq_id, []
        for seq_id in numbers:
            if seq_id >= self._handed_over_at:
                break
            if seq_id == following or seq_id in jumps:
                following = seq_id + 1
            else:
                dropped.append(seq_id)
                self.queued_bytes -= self._waiting.pop(seq_id)
        return dropped

    def cross_hand_over(self) -> bool:
        """Continue behind a jump of the numbers, if all before it have run; return whether."""
        first = min(self._waiting, default=0)
        if self.is_running or first <= self.next_seq_id + MAX_AHEAD:
            return False
        self.next_seq_id = first
        return True

    def recall(self, seq_id: int, digest: bytes) -> None:
        """Record the content digest of a request that another process has finished."""
        self._digests[seq_id] = digest

    def forget(self, seq_id: int) -> None:
        """Drop the content digest of a finished request, whose result is no longer kept."""
        if seq_id < self.next_seq_id:
            self._digests.pop(seq_id, None)
