"""Compares a live child with its manifest: every field that the operator sets must match.

Fields set by others (defaults, status, other managers) are ignored.
"""

from collections.abc import Mapping, Sequence

from tinkercloud_kube.objects import Manifest

_SCALARS = (str, int, float, type(None))


def is_up_to_date(wanted: Manifest, live: Manifest | None) -> bool:
    """Return whether a live object has every field of the manifest."""
    return live is not None and _holds(wanted, live)


def _holds(wanted: object, live: object) -> bool:
    # Most values are scalars, and asking whether one is a Mapping takes ten times as long.
    if isinstance(wanted, _SCALARS):
        return wanted == live
    if isinstance(wanted, (dict, Mapping)):
        fields = {} if live is None else live
        return isinstance(fields, (dict, Mapping)) and all(
            _holds(value, fields.get(key)) for key, value in wanted.items()
        )
    if isinstance(wanted, Sequence):
        return _same_items(wanted, live if live is not None else [])
    return wanted == live


def _same_items(wanted: Sequence[object], live: object) -> bool:
    return (
        isinstance(live, Sequence)
        and not isinstance(live, str)
        and len(live) == len(wanted)
        and all(_holds(mine, theirs) for mine, theirs in zip(wanted, live, strict=True))
    )
