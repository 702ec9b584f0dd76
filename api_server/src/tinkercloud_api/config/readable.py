"""Sizes, times and names as people read them: one form of each, in commands, logs and messages."""

from datetime import UTC, datetime

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def binary_size(size: int) -> str:
    """Return a number of bytes for people, such as `1.5 GiB`."""
    shown, unit = float(size), 0
    while shown >= 1024 and unit < len(_UNITS) - 1:
        shown, unit = shown / 1024, unit + 1
    return f"{shown:.1f} {_UNITS[unit]}" if unit else f"{size} bytes"


def printable(text: str, kept: str = "") -> str:
    """Return a text whose control characters and direction marks are replaced.

    A terminal would obey them, and they could make one name look like another.

    Args:
        text: what others may have written.
        kept: characters that stay, such as line breaks.
    """
    replacement = "\N{REPLACEMENT CHARACTER}"
    return "".join(each if each.isprintable() or each in kept else replacement for each in text)


def moment(time: datetime | str | None) -> str:
    """Return a time in UTC to the second, such as `2026-11-28T19:14:30Z`; empty for None.

    Args:
        time: a time with its zone, or the same in ISO 8601.
    """
    if time is None:
        return ""
    parsed = datetime.fromisoformat(time) if isinstance(time, str) else time
    return f"{parsed.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def parse_moment(text: str) -> datetime:
    """Parse a day or a time in ISO 8601; without a zone it is in UTC.

    Raises:
        ValueError: it is none; the message names the accepted forms.
    """
    try:
        parsed = datetime.fromisoformat(text)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is not a time; expected a day or a time, in UTC unless it has a zone, such"
            " as 2026-11-28, 2026-11-28T19:14 or 2026-11-28T21:14:30+02:00"
        ) from None


def age_of(time: datetime | str) -> str:
    """Return how long ago a time was, in its largest unit, such as `5 min`.

    Args:
        time: a time with its zone, or the same in ISO 8601.
    """
    parsed = datetime.fromisoformat(time) if isinstance(time, str) else time
    seconds = max(0, int((datetime.now(UTC) - parsed).total_seconds()))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
