"""`make bench-compare A=old.json B=new.json`: what became worse between two results.

Ends with status 1 if a figure is worse than `_TOLERANCE` allows. Both results must be of the same
kind of machine for figures in seconds to mean anything; ratios may be compared across machines.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_TOLERANCE = 0.10
"""Relative difference below which a figure counts as equal: that of two runs on a busy machine."""


def main() -> None:
    """Print the table, and end with status 1 if something became worse.

    Raises:
        SystemExit: a file is missing or is no result, or a figure became worse.
    """
    if len(sys.argv) != 3:
        sys.exit("name two results: make bench-compare A=old.json B=new.json")
    before, after = (_figures(Path(name)) for name in sys.argv[1:])
    table, num_worse = Table("id", "what", "before", "after", "change", ""), 0
    for key, new in after.items():
        old = before.get(key)
        if old is None:
            continue
        change, word = judged(old["value"], new["value"], new["wanted"])
        num_worse += word == "worse"
        values = (f"{each['value']:.4g} {each['unit']}".strip() for each in (old, new))
        table.add_row(*key, *values, change, word)
    Console(width=160).print(table)
    missing = [" ".join(key) for key in before.keys() - after.keys()]
    if missing:
        print("not measured any more: " + "; ".join(sorted(missing)))
    if num_worse:
        sys.exit(f"{num_worse} figures are worse by more than {_TOLERANCE:.0%}")


def judged(old: float, new: float, wanted: str) -> tuple[str, str]:
    """Return the relative change in words, and whether it is better, worse or equal.

    Args:
        old: the earlier figure.
        new: the later figure.
        wanted: its target, `>= x` or `<= x`, which says whether more is better.
    """
    if old == 0:
        change, shown = (0.0 if new == 0 else float("inf")), "from 0" if new else "+0 %"
    else:
        change = (new - old) / abs(old)
        shown = f"{change:+.0%}"
    gain = change if wanted.startswith(">=") else -change
    if abs(gain) <= _TOLERANCE:
        return shown, ""
    return shown, "better" if gain > 0 else "worse"


def _figures(file: Path) -> dict[tuple[str, str], Mapping[str, Any]]:
    try:
        measured = json.loads(file.read_text())["measurements"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{file} is no result of `make bench`: {error!r}")
    return {(each["id"], each["what"]): each for each in measured}


if __name__ == "__main__":
    main()
