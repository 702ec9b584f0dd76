"""Draws the states of a model in a head on docs/understand/suspend-and-resume.md."""

from collections import defaultdict
from pathlib import Path

from tinkercloud_worker.head.model.model_lifetime import TRANSITIONS, ModelState

PAGE = Path(__file__).parent.parent / "docs" / "understand" / "suspend-and-resume.md"
START = "<!-- Drawings: written by `make docs` from the table of transitions. Do not edit. -->"
END = "<!-- End of drawings. -->"
FIRST = "In one head:"
OWN_STATES = {
    "Between heads:": {
        ModelState.MOVING,
        ModelState.LEAVING,
        ModelState.MOVED,
        ModelState.REFUSED,
        ModelState.DROPPING,
        ModelState.TAKEN_OVER,
    },
    "Read from what another head has left:": {ModelState.RECOVERING, ModelState.AWAITED},
}
"""States by the drawing that has all of their transitions; `FIRST` has the others."""


def text() -> str:
    """Return the page with the drawings of today's table."""
    before, _, rest = PAGE.read_text().partition(START)
    after = rest.partition(END)[2]
    return f"{before}{START}\n{drawings()}\n{END}{after}"


def drawings() -> str:
    """Return all drawings. Deletions, and events that change nothing, would hide the others."""
    arrows: dict[str, dict[tuple[ModelState, ModelState], list[str]]] = {FIRST: defaultdict(list)}
    arrows |= {title: defaultdict(list) for title in OWN_STATES}
    for (before, event), after in TRANSITIONS.items():
        if before is not after and not (before.is_being_deleted or after.is_being_deleted):
            arrows[_title(before, after)][before, after].append(event)
    return "\n".join(
        "\n".join([f"\n{title}\n\n```mermaid\nstateDiagram-v2", *_lines(drawn), "```"])
        for title, drawn in arrows.items()
    )


def _title(before: ModelState, after: ModelState) -> str:
    return next((title for title, own in OWN_STATES.items() if own & {before, after}), FIRST)


def _lines(arrows: dict[tuple[ModelState, ModelState], list[str]]) -> list[str]:
    return [
        f"    {_name(before)} --> {_name(after)}: {', or '.join(events)}"
        for (before, after), events in arrows.items()
    ]


def _name(state: ModelState) -> str:
    """Return a name without spaces; `[*]` is a dot."""
    return "[*]" if state is ModelState.ABSENT else state.replace(" ", "_")
