"""Accounting of published weights: sizes, steps, users, and which to evict next."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class WeightsLru:
    """Names of weights with their sizes and users. Uses no clock, task or file."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty.

        Args:
            max_bytes: total size, which only required or used weights may exceed.
        """
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] = {}
        """Bytes by name, the least recently used first."""
        self._steps: dict[str, int] = {}
        self._users: Counter[str] = Counter()

    def add(self, name: str, size_bytes: int, step: int | None = None) -> None:
        """Add weights as the most recently used.

        Args:
            name: their name.
            size_bytes: their size.
            step: number of optimizer steps that they have taken; None if it is not known.
        """
        self.remove(name)
        self._sizes[name] = size_bytes
        if step is not None:
            self._steps[name] = step

    def remove(self, name: str) -> None:
        """Remove weights, which may be unknown."""
        self._sizes.pop(name, None)
        self._steps.pop(name, None)

    def size_of(self, name: str) -> int:
        """Return the bytes of weights; 0 if they are unknown."""
        return self._sizes.get(name, 0)

    def step_of(self, name: str) -> int | None:
        """Return the optimizer steps of weights; None if they are unknown."""
        return self._steps.get(name)

    @contextmanager
    def used(self, name: str) -> Iterator[None]:
        """Protect weights from eviction in the context. They need not exist yet."""
        self._users[name] += 1
        try:
            yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
            if name in self._sizes:
                self._sizes[name] = self._sizes.pop(name)

    def next_to_go(self, needed: Collection[str]) -> str | None:
        """Return the weights to evict next; None if the rest fits, or nothing can be evicted.

        Args:
            needed: names that are never evicted.
        """
        if sum(self._sizes.values()) <= self._max_bytes:
            return None
        protected = {*needed, *self._users}
        return next((name for name in self._sizes if name not in protected), None)
