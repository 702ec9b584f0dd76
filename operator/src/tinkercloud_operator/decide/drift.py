"""Whether a live child is as it should be: every field we set is there, with our value.

Fields that others have added (defaults, status, other managers) are none of our business.
"""

from collections.abc import Mapping, Sequence

from tinkercloud_operator.spec.snapshot import Manifest


def is_up_to_date(wanted: Manifest, live: Manifest | None) -> bool:
    """Whether a live object holds everything the wanted one says."""
    return live is not None and _holds(wanted, live)


def _holds(wanted: object, live: object) -> bool:
    if isinstance(wanted, Mapping):
        fields = {} if live is None else live
        return isinstance(fields, Mapping) and all(
            _holds(value, fields.get(key)) for key, value in wanted.items()
        )
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return _same_items(wanted, live if live is not None else [])
    return wanted == live


def _same_items(wanted: Sequence[object], live: object) -> bool:
    return (
        isinstance(live, Sequence)
        and not isinstance(live, str)
        and len(live) == len(wanted)
        and all(_holds(mine, theirs) for mine, theirs in zip(wanted, live, strict=True))
    )
