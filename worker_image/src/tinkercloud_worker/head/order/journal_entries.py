"""What a journal records of the requests of a run, and which of them are not finished."""

from tinkercloud_worker.head.order.queued_request import QueuedRequest, Role
from tinkercloud_worker.journal.records import Entry


class JournalEntries:
    """The entries of one run's journal. Belongs to one event loop."""

    def __init__(self) -> None:
        """Start without requests."""
        self._unfinished: dict[int, tuple[int, Role]] = {}
        """Indexes of the records of requests, and their roles, by number."""
        self._read: list[str] = []
        self._key: tuple[int, str] | None = None
        self.has_gradient = False
        """Whether a request may have left a gradient."""
        self.needed = -1
        """Index of the record that must be durable before the next result is published."""

    def entry(self, queued: QueuedRequest, path: str) -> Entry:
        """Return the entry of a request, with what was read since the last one.

        Args:
            queued: the request.
            path: its path in the HTTP API.
        """
        key = self._key[1] if self._key is not None and self._key[0] == queued.seq_id else None
        read, self._read = tuple(self._read), []
        return Entry(
            seq_id=queued.seq_id,
            path=path,
            role=queued.operation.role,
            digest=queued.digest.hex(),
            size=queued.size,
            knows_of=queued.acknowledged_failure,
            key=key,
            read=read,
        )

    def added(self, queued: QueuedRequest, index: int) -> None:
        """Record the index of a request's record."""
        self._unfinished[queued.seq_id] = index, queued.operation.role

    def record_key(self, seq_id: int, key: str | None) -> None:
        """See `RequestLog.record_key`."""
        self._key = (seq_id, key) if key is not None else None

    def record_read(self, request_id: str) -> None:
        """See `RequestLog.record_read`."""
        self._read.append(request_id)

    def finished(self, seq_id: int) -> Role | None:
        """Record that a request has ended; return its role, or None if it has no record."""
        index, role = self._unfinished.pop(seq_id, (-1, None))
        self.needed = max(self.needed, index)
        if role in {"gradient", "load", "step"}:
            self.has_gradient = role == "gradient"
        return role
