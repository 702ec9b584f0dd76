"""The last known state of the objects of one kind. Pure: no I/O and no clock.

States arrive from several sides: watch events, answers to writes, and complete lists. The newest
resource version wins, wherever it came from, so a late event never hides a later write. A complete
list also removes objects that were deleted unnoticed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Manifest = Mapping[str, Any]
"""A Kubernetes object as JSON."""


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """How the known state of one object changed."""

    name: str
    before: T | None
    """None if the object was not known."""
    after: T | None
    """None if the object is gone."""


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    uid: str
    version: int
    value: T


class Objects(Mapping[str, T]):
    """The objects of one kind in one namespace, by name.

    Args:
        keep: returns what is kept of a manifest, or None to leave the object out.
    """

    def __init__(self, keep: Callable[[Manifest], T | None]) -> None:
        self._keep = keep
        self._entries: dict[str, _Entry[T]] = {}
        self._tombstones: dict[str, int] = {}
        """Resource versions of deleted objects by uid, until the next complete list."""

    def __getitem__(self, name: str) -> T:
        return self._entries[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, manifest: Manifest, *, is_gone: bool = False) -> Change[T] | None:
        """Note one object as it is, or as it was when it was deleted.

        Returns:
            What changed; None if a state at least as new was known.
        """
        metadata = manifest["metadata"]
        name, uid, version = metadata["name"], metadata["uid"], _version(manifest)
        known = self._entries.get(name)
        if self._tombstones.get(uid, 0) >= version:
            return None
        if known is not None:
            is_outdated = known.uid != uid if is_gone else known.version >= version
            if is_outdated:
                return None
        kept = None if is_gone else self._keep(manifest)
        if is_gone:
            self._tombstones[uid] = version
        if kept is None:
            self._entries.pop(name, None)
        else:
            self._entries[name] = _Entry(uid, version, kept)
        return Change(name, None if known is None else known.value, kept)

    def replace(self, manifests: Iterable[Manifest], version: int) -> list[Change[T]]:
        """Note a complete list of the objects.

        Args:
            manifests: all objects at one moment.
            version: resource version of that moment; objects known to be newer are kept.

        Returns:
            What changed.
        """
        changes: list[Change[T]] = []
        present = set()
        for manifest in manifests:
            present.add(manifest["metadata"]["uid"])
            change = self.note(manifest)
            if change is not None:
                changes.append(change)
        vanished = [
            name
            for name, entry in self._entries.items()
            if entry.uid not in present and entry.version <= version
        ]
        changes += [Change(name, self._entries.pop(name).value, None) for name in vanished]
        self._tombstones = {
            uid: deleted_at for uid, deleted_at in self._tombstones.items() if deleted_at > version
        }
        return changes

    def forget(self, name: str) -> Change[T] | None:
        """Drop an object; any later report of it counts. Return what changed."""
        known = self._entries.pop(name, None)
        return None if known is None else Change(name, known.value, None)


def _version(manifest: Manifest) -> int:
    """Return a resource version; resource versions are numbers that grow (KEP-5504)."""
    return int(manifest["metadata"]["resourceVersion"])
