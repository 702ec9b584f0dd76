"""What published weights take, and whose turn it is to go when that is too much."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class WeightsLru:
    """Names of weights that are kept, with their sizes and users. No clock, task or file."""

    def __init__(self, max_bytes: int) -> None:
        """Start with none.

        Args:
            max_bytes: of all that is kept, unless what is needed or in use takes more.
        """
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] = {}
        """Bytes of each, the least recently used first."""
        self._users: Counter[str] = Counter()

    def add(self, name: str, size_bytes: int) -> None:
        """Count weights, as used just now."""
        self._sizes.pop(name, None)
        self._sizes[name] = size_bytes

    def remove(self, name: str) -> None:
        """Stop counting weights. They may be unknown."""
        self._sizes.pop(name, None)

    def size_of(self, name: str) -> int:
        """Return the bytes of weights, which were counted; 0 if they are unknown."""
        return self._sizes.get(name, 0)

    @contextmanager
    def used(self, name: str) -> Iterator[None]:
        """Keep weights from being dropped in the context. They need not exist yet."""
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
        """Return the least recently used weights that may go; None if there is no need, or none.

        Args:
            needed: what stays, whatever it takes.
        """
        if sum(self._sizes.values()) <= self._max_bytes:
            return None
        staying = {*needed, *self._users}
        return next((name for name in self._sizes if name not in staying), None)
