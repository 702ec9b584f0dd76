"""How pages show what others have written, and numbers, sizes and times."""

from tinkercloud_api.config.readable import printable
from tinkercloud_protocol.responses.run_states import CurveMetric


def shown(value: object, most: int = 200) -> str:
    """Return a text without control characters, cut to a length that fits a page.

    Args:
        value: what is shown.
        most: number of characters from which on it is cut.
    """
    text = str(value)
    return printable(text[:most]) + ("…" if len(text) > most else "")


def output(text: str) -> str:
    """Return the output of a program without control characters, apart from ends of lines."""
    return printable(text, kept="\n\t")


def number(value: float | None) -> str:
    """Return a number with five digits; a dash for None."""
    return "-" if value is None else f"{value:.5g}"


def mean(values: CurveMetric | None) -> str:
    """Return the mean of a metric, and how many steps have no finite value; empty for None."""
    if values is None:
        return ""
    note = f" ({values.not_finite} not finite)" if values.not_finite else ""
    return f"{number(values.mean)}{note}"
