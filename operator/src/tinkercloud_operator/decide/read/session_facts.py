"""What several decisions read from the objects of sessions as they are stored. Pure."""

from tinkercloud_crds.conditions import ConditionType
from tinkercloud_crds.quota_fields import Age
from tinkercloud_kube.objects import Manifest


def is_live(session: Manifest) -> bool:
    """Return whether a session counts towards its owner's session limit."""
    return session.get("status", {}).get("finishedTime") is None


def age(manifest: Manifest) -> Age:
    """Return the sort key that orders objects oldest first; the name breaks ties."""
    return manifest["metadata"]["creationTimestamp"], manifest["metadata"]["name"]


def condition(session: Manifest, kind: ConditionType) -> Manifest:
    """Return a condition of a session as it was last written; an empty one if it is not set."""
    conditions: list[Manifest] = session.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})
