"""How pages show what others have written, and numbers, sizes and times."""

from datetime import datetime

_MAX_SHOWN = 200
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def shown(value: object) -> str:
    """Return a text without control characters, cut to a length that fits a page.

    Direction marks are replaced as well: they could make one name look like another.
    """
    text = str(value)
    cut = text[:_MAX_SHOWN] + ("…" if len(text) > _MAX_SHOWN else "")
    return "".join(each if each.isprintable() else _REPLACEMENT for each in cut)


def output(text: str) -> str:
    """Return the output of a program without control characters, apart from ends of lines."""
    return "".join(each if each.isprintable() or each in "\n\t" else _REPLACEMENT for each in text)


def number(value: float | None) -> str:
    """Return a number with five digits; a dash for None."""
    return "-" if value is None else f"{value:.5g}"


def moment(value: datetime) -> str:
    """Return a time in UTC, to the second."""
    return value.strftime("%Y-%m-%d %H:%M:%S UTC")
