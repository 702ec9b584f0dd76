"""Checks that no session gets a place on a cluster of a pool that has no free slot."""

from collections.abc import Callable, Mapping
from typing import Any

from tinkercloud_testing.simulation.cluster.api_server import ApiServer

_NOTICED_SECONDS = 60.0
"""Time in which the operator notices a change of a BaseModel."""


class PlacesOnClusters:
    """Follows the places of sessions, and the slots of BaseModels.

    Args:
        server: the API server.
        violate: called with what must never happen.
    """

    def __init__(self, server: ApiServer, violate: Callable[[str], object]) -> None:
        self._server = server
        self._violate = violate
        self._places: dict[str, str] = {}
        """By uid of the session."""
        self._slots: dict[str, list[tuple[float, int]]] = {}
        """By model name: since when there are how many slots."""

    def __call__(self, kind: str, event: str, manifest: Mapping[str, Any]) -> None:
        """Note a change."""
        spec, uid = manifest.get("spec", {}), manifest["metadata"]["uid"]
        if kind == "BaseModel" and "pool" in spec:
            history = self._slots.setdefault(spec["modelName"], [])
            history.append((self._now(), int(spec["pool"].get("slotsPerCluster", 8))))
        if kind != "TrainingSession" or spec.get("sharing") != "Shared":
            return
        has_ended = event == "DELETED" or "finishedTime" in manifest.get("status", {})
        place = None if has_ended else spec.get("poolCluster")
        before = self._places.pop(uid, None)
        if place is None:
            return
        self._places[uid] = place
        if place == before:
            return
        taken = list(self._places.values()).count(place)
        if taken > self._most_slots(spec["baseModel"]):
            name = manifest["metadata"]["name"]
            self._violate(f"{name} is placed on {place}, which then has {taken} sessions")

    def _most_slots(self, model_name: str) -> int:
        """Return how many slots a cluster has, or had a moment ago."""
        history, now = self._slots.get(model_name, []), self._now()
        recent = [slots for at, slots in history if at > now - _NOTICED_SECONDS]
        older = [slots for at, slots in history if at <= now - _NOTICED_SECONDS]
        return max([*recent, *older[-1:]], default=0)

    def _now(self) -> float:
        return self._server.clock.now().timestamp()
