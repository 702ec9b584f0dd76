"""The order of one model's requests: a pure state machine, without clock, tasks or I/O.

The SDK numbers a model's requests 1, 2, 3, ... and sends several at once, so they arrive in any
order, more than once, and sometimes never. Requests run strictly by number, one at a time; a
number that was seen with the same content is the same request; with other content it is an error.
"""

from dataclasses import dataclass, field

from tinkercloud_protocol.errors import InvalidRequest, Overloaded

MAX_AHEAD = 4096
"""Numbers a request may be ahead of the one that runs."""


@dataclass(slots=True)
class Sequencer:
    """What has arrived, what runs, and what comes next."""

    max_queued_bytes: int
    next_seq_id: int = 1
    """The lowest number that has not finished."""
    is_running: bool = False
    """Whether `next_seq_id` is being run."""
    _waiting: dict[int, int] = field(default_factory=dict)
    """Numbers that have arrived and not begun, with their sizes in bytes."""
    queued_bytes: int = 0
    """Size of all waiting requests."""
    _digests: dict[int, bytes] = field(default_factory=dict)
    """Content of every number that is waiting, running, or whose result is kept."""

    def offer(self, seq_id: int, digest: bytes, size: int, elsewhere: int = 0) -> bool:
        """Take note of a request; return whether it is new.

        Args:
            seq_id: its number.
            digest: equal for equal content.
            size: bytes that it takes while it waits.
            elsewhere: bytes that wait in other orders and count against the same limit.

        Raises:
            InvalidRequest: the number was used with other content, is long past, or is absurdly
                far ahead.
            Overloaded: too many bytes wait already.
        """
        known = self._digests.get(seq_id)
        if known is not None:
            if known != digest:
                raise InvalidRequest(
                    f"seq_id {seq_id} was used before by a request with other content; each request"
                    " needs its own number"
                )
            return False
        if seq_id < self.next_seq_id:
            raise InvalidRequest(
                f"seq_id {seq_id} is in the past: requests up to {self.next_seq_id - 1} are over"
            )
        if seq_id > self.next_seq_id + MAX_AHEAD:
            raise InvalidRequest(
                f"seq_id {seq_id} is too far ahead: the next request to run is {self.next_seq_id}"
            )
        # What runs next is always let in, or a full queue would wait for ever.
        waiting = self.queued_bytes + elsewhere
        if seq_id != self.next_seq_id and waiting + size > self.max_queued_bytes:
            raise Overloaded(
                f"{self.queued_bytes} bytes of requests wait for this model already, {elsewhere}"
                " for other models of its owner, and limits.max_queued_bytes is"
                f" {self.max_queued_bytes}; wait for some results before sending more"
            )
        self.admit(seq_id, digest, size)
        return True

    def admit(self, seq_id: int, digest: bytes, size: int) -> None:
        """Let a request wait that was taken in before, however much waits already."""
        self._waiting[seq_id] = size
        self.queued_bytes += size
        self._digests[seq_id] = digest

    def has_room_alone(self, size: int) -> bool:
        """Whether one more request of that size may wait when nothing else of its owner does."""
        return self.queued_bytes + size <= self.max_queued_bytes

    @property
    def num_pending(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + self.is_running

    def take(self) -> int | None:
        """Begin the next request, if it is there and none is running; return its number."""
        if self.is_running or self.next_seq_id not in self._waiting:
            return None
        self.queued_bytes -= self._waiting.pop(self.next_seq_id)
        self.is_running = True
        return self.next_seq_id

    def finish(self) -> None:
        """The running request is over."""
        self.is_running = False
        self.next_seq_id += 1

    @property
    def is_stuck(self) -> bool:
        """Whether requests wait for one that has not arrived."""
        return not self.is_running and bool(self._waiting) and self.next_seq_id not in self._waiting

    def skip_gap(self) -> list[int]:
        """Stop waiting for what is missing; return the numbers that waited behind it, dropped.

        The next number is the one after the last of them.
        """
        dropped = sorted(self._waiting)
        if dropped:
            self._waiting.clear()
            self.queued_bytes = 0
            self.next_seq_id = dropped[-1] + 1
        return dropped

    def recall(self, seq_id: int, digest: bytes) -> None:
        """Note the content of a request that was finished in another process."""
        self._digests[seq_id] = digest

    def forget(self, seq_id: int) -> None:
        """The result of a finished request is no longer kept: nor need its content be known."""
        if seq_id < self.next_seq_id:
            self._digests.pop(seq_id, None)
