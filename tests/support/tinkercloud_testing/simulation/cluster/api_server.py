"""A simulated API server: versions, preconditions, server-side apply, finalizers, dependents.

Objects are never changed in place, so that readers may keep what they get. Requests of the operator
arrive through `connection`; the simulated controllers call the methods directly.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, Literal

from tinkercloud_crds.conditions import timestamp
from tinkercloud_testing.simulation.virtual_time import Clock

Json = dict[str, Any]
EventType = Literal["ADDED", "MODIFIED", "DELETED"]
Subscriber = Callable[[str, EventType, Json], object]

CUSTOM_KINDS = frozenset({"TrainingSession", "BaseModel", "Tenant", "RayCluster"})
"""Kinds whose status is written apart from the rest, and which have a generation."""


class ApiError(Exception):
    """An error answer."""

    def __init__(self, status: int, message: str, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason


@dataclass
class ApiServer:
    """The objects of one namespace, and of the cluster."""

    clock: Clock
    random: random.Random
    objects: dict[str, dict[str, Json]] = field(default_factory=lambda: defaultdict(dict))
    """By kind, then by name."""
    subscribers: list[Subscriber] = field(default_factory=list)
    """Called with each change, in order."""
    version: int = 0
    _applied: dict[tuple[str, str], Json] = field(default_factory=dict)
    """By uid and part (`spec` or `status`): what the operator applied last."""
    _uids: Callable[[], int] = field(default_factory=lambda: count(1).__next__)

    # Reads.

    def find(self, kind: str, name: str) -> Json | None:
        """Return an object, or None."""
        return self.objects[kind].get(name)

    def get(self, kind: str, name: str) -> Json:
        """Return an object.

        Raises:
            ApiError: it does not exist.
        """
        found = self.find(kind, name)
        if found is None:
            raise ApiError(404, f'{kind} "{name}" not found', "NotFound")
        return found

    def all(self, kind: str) -> list[Json]:
        """Return the objects of a kind."""
        return list(self.objects[kind].values())

    # Writes.

    def create(self, kind: str, manifest: Mapping[str, Any]) -> Json:
        """Create an object.

        Raises:
            ApiError: there is one with that name, or its namespace of names is exhausted.
        """
        metadata = dict(manifest["metadata"])
        name = str(metadata["name"])
        if name in self.objects[kind]:
            raise ApiError(409, f'{kind} "{name}" already exists', "AlreadyExists")
        metadata |= {
            "namespace": "default",
            "uid": f"{kind.lower()}-{self._uids()}",
            "creationTimestamp": timestamp(self.clock.now()),
            "generation": 1,
        }
        content = {key: value for key, value in manifest.items() if key != "status"}
        if kind not in CUSTOM_KINDS:
            content = dict(manifest)
        return self._store("ADDED", kind, {**content, "kind": kind, "metadata": metadata})

    def update(self, kind: str, name: str, change: Mapping[str, Any]) -> Json | None:
        """Merge a change into an object that exists: fields that are None are removed."""
        found = self.find(kind, name)
        return None if found is None else self._replace(kind, found, merged(found, change))

    def merge(self, kind: str, name: str, patch: Mapping[str, Any]) -> Json:
        """Change an object (JSON merge patch).

        Raises:
            ApiError: it does not exist, or is not the one that the patch names.
        """
        found = self.get(kind, name)
        _check(found, patch.get("metadata", {}))
        content = {key: value for key, value in patch.items() if key != "status"}
        if kind not in CUSTOM_KINDS:
            content = dict(patch)
        return self._replace(kind, found, merged(found, content))

    def apply(self, kind: str, manifest: Mapping[str, Any], part: str) -> Json:
        """Create or change an object (server-side apply of the operator, with force).

        Args:
            kind: of the object.
            manifest: the fields that the operator wants.
            part: `spec` for everything except the status, or `status`.

        Raises:
            ApiError: the object is not the one that the manifest names.
        """
        name = str(manifest["metadata"]["name"])
        found = self.find(kind, name)
        if found is None:
            if part == "status":
                raise ApiError(404, f'{kind} "{name}" not found', "NotFound")
            if "uid" in manifest["metadata"]:
                raise ApiError(409, "uid mismatch: no existing object was found", "Conflict")
            created = self.create(kind, manifest)
            self._applied[created["metadata"]["uid"], part] = _own_fields(manifest)
            return created
        _check(found, manifest["metadata"])
        if part == "status":
            wanted: Json = {"status": dict(manifest["status"])}
        else:
            wanted = _own_fields(manifest)
        uid = found["metadata"]["uid"]
        before = self._applied.get((uid, part), {})
        self._applied[uid, part] = wanted
        return self._replace(kind, found, _applied(_without(found, before, wanted), wanted))

    def delete(
        self, kind: str, name: str, uid: str | None = None, grace: float | None = None
    ) -> Json:
        """Delete an object; its dependents follow in the background.

        Args:
            kind: of the object.
            name: of the object.
            uid: of the object; None for any.
            grace: of a pod, in seconds; None for its own.

        Raises:
            ApiError: it does not exist, or has another uid.
        """
        found = self.get(kind, name)
        if uid is not None:
            _check(found, {"uid": uid})
        metadata = found["metadata"]
        is_bound = kind == "Pod" and "nodeName" in found["spec"]
        if is_bound and grace != 0:
            if "deletionTimestamp" in metadata:
                return found
            seconds = found["spec"].get("terminationGracePeriodSeconds", 30)
            due = self.clock.now() + timedelta(seconds=seconds)
            marks: Json = {
                "deletionTimestamp": timestamp(due),
                "deletionGracePeriodSeconds": seconds,
            }
            return self._replace(kind, found, merged(found, {"metadata": marks}))
        if metadata.get("finalizers"):
            if "deletionTimestamp" in metadata:
                return found
            marks = {"deletionTimestamp": timestamp(self.clock.now())}
            return self._replace(kind, found, merged(found, {"metadata": marks}))
        return self._remove(kind, found)

    def remove(self, kind: str, name: str) -> None:
        """Remove an object at once, if it exists."""
        found = self.find(kind, name)
        if found is not None:
            self._remove(kind, found)

    # The garbage collector.

    def collect_garbage(self) -> None:
        """Delete objects whose owners are gone, and forget those owners of other objects."""
        everything = [
            (kind, item) for kind, items in self.objects.items() for item in items.values()
        ]
        uids = {item["metadata"]["uid"] for _, item in everything}
        for kind, item in everything:
            metadata = item["metadata"]
            owners = metadata.get("ownerReferences", [])
            left = [owner for owner in owners if owner["uid"] in uids]
            if len(left) == len(owners):
                continue
            if left:
                self.update(kind, metadata["name"], {"metadata": {"ownerReferences": left}})
            elif "deletionTimestamp" not in metadata:
                self.delete(kind, metadata["name"])

    def _replace(self, kind: str, before: Json, after: Json) -> Json:
        metadata = after["metadata"]
        is_ending = "deletionTimestamp" in metadata and kind != "Pod"
        if is_ending and not metadata.get("finalizers"):
            return self._remove(kind, after)
        if _content(before) == _content(after):
            return before
        if kind in CUSTOM_KINDS and before.get("spec") != after.get("spec"):
            generation = metadata.get("generation", 1) + 1
            after = {**after, "metadata": {**metadata, "generation": generation}}
        return self._store("MODIFIED", kind, after)

    def _store(self, event: EventType, kind: str, manifest: Json) -> Json:
        self.version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self.version)}
        stored = {**manifest, "metadata": metadata}
        self.objects[kind][metadata["name"]] = stored
        self._announce(kind, event, stored)
        return stored

    def _remove(self, kind: str, manifest: Json) -> Json:
        self.version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self.version)}
        self.objects[kind].pop(metadata["name"], None)
        self._applied.pop((metadata["uid"], "spec"), None)
        self._applied.pop((metadata["uid"], "status"), None)
        last = {**manifest, "metadata": metadata}
        self._announce(kind, "DELETED", last)
        return last

    def _announce(self, kind: str, event: EventType, manifest: Json) -> None:
        for subscriber in [*self.subscribers]:
            subscriber(kind, event, manifest)


def merged(before: Any, change: Any) -> Any:
    """Return a JSON value with a merge patch applied."""
    if not isinstance(change, Mapping):
        return change
    after = dict(before) if isinstance(before, Mapping) else {}
    for key, value in change.items():
        if value is None:
            after.pop(key, None)
        else:
            after[key] = merged(after.get(key), value)
    return after


def _applied(before: Any, wanted: Any) -> Any:
    """Return a JSON value with a server-side apply; owners and finalizers are merged by entry."""
    if not isinstance(wanted, Mapping) or not isinstance(before, Mapping):
        return wanted
    after = dict(before)
    for key, value in wanted.items():
        if key == "finalizers":
            after[key] = list(dict.fromkeys([*before.get(key, []), *value]))
        elif key == "ownerReferences":
            uids = {each["uid"] for each in value}
            after[key] = [each for each in before.get(key, []) if each["uid"] not in uids] + value
        else:
            after[key] = _applied(before[key], value) if key in before else value
    return after


def _without(found: Json, before: Mapping[str, Any], wanted: Mapping[str, Any]) -> Json:
    """Return an object without the fields that were applied before and are not any more."""
    after = dict(found)
    for key, value in before.items():
        if key not in wanted:
            after.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(after.get(key), Mapping):
            after[key] = _without(after[key], value, wanted[key] or {})
    return after


def _own_fields(manifest: Mapping[str, Any]) -> Json:
    """Return an applied manifest without the fields that only identify its object."""
    identity = {"uid", "resourceVersion", "name", "namespace"}
    metadata = {key: each for key, each in manifest["metadata"].items() if key not in identity}
    content = {key: each for key, each in manifest.items() if key not in {"status", "kind"}}
    return {**content, "metadata": metadata}


def _check(found: Json, wanted: Mapping[str, Any]) -> None:
    for key in ("uid", "resourceVersion"):
        if wanted.get(key) not in {None, found["metadata"][key]}:
            message = f"the {key} is {found['metadata'][key]}, and the request says {wanted[key]}"
            raise ApiError(409, message, "Conflict")


def _content(manifest: Json) -> Json:
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": ""}}


def has_label(manifest: Mapping[str, Any], key: str) -> bool:
    """Return whether an object has a label of that name."""
    return key in manifest["metadata"].get("labels", {})


def owners_of(manifest: Mapping[str, Any], kind: str) -> list[str]:
    """Return the uids of an object's owners of a kind."""
    owners = manifest["metadata"].get("ownerReferences", [])
    return [str(owner["uid"]) for owner in owners if owner["kind"] == kind]
