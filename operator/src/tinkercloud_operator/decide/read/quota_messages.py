"""Reads why a ResourceQuota rejects an object, from the words of the API server. Pure."""

import re

from tinkercloud_operator.spec.quantities import parse_quantity

_REJECTED = re.compile(r"requested: ([^ ]+), used: ([^ ]+), limited: ([^ ]+)")
_HELD = frozenset({"cpu", "memory", "ephemeral-storage"})
"""Resources of every pod, as are devices."""
_OBJECTS = frozenset({"pods", "services", "secrets", "configmaps", "rayclusters.ray.io"})
"""Kinds of objects of every spare."""


def never_within(message: str) -> bool:
    """Return whether the message of a quota shows that even an unused quota would be too small."""
    match = _REJECTED.search(message)
    if match is None:
        return False
    requested, limited = _amounts(match[1]), _amounts(match[3])
    return any(
        name in limited and parse_quantity(amount) > parse_quantity(limited[name])
        for name, amount in requested.items()
    )


def spares_hold(message: str) -> bool:
    """Return whether warm spares hold all that a quota has too little of, by its message.

    They have no claims of volumes, for example: their end makes no room for one. A message of an
    unknown form does not show it.
    """
    match = _REJECTED.search(message)
    return match is not None and all(map(_is_held, _amounts(match[1])))


def _is_held(resource: str) -> bool:
    """Return whether each spare holds some of a resource, by its name in quotas."""
    counted = resource.removeprefix("count/")
    if counted in _OBJECTS:
        return True
    name = resource.removeprefix("requests.").removeprefix("limits.")
    is_device = resource.startswith("requests.") and "/" in name
    return is_device or name in _HELD


def _amounts(listed: str) -> dict[str, str]:
    """Return amounts by the name of their resource."""
    return dict(pair.split("=", 1) for pair in listed.split(",") if "=" in pair)
