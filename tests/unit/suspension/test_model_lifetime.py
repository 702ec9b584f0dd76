"""The states of a model in a head are documented, and change as documented."""

import re
from itertools import product
from pathlib import Path

import pytest

from tinkercloud_worker.head.model.model_lifetime import (
    TRANSITIONS,
    ImpossibleTransition,
    ModelEvent,
    ModelPlace,
    ModelState,
    after,
)

PAGE = Path(__file__).parents[3] / "docs" / "understand" / "suspend-and-resume.md"
_SECTION = re.compile(r"^## A model in a head$(.*?)^## ", re.MULTILINE | re.DOTALL)
_ALL_BUT = "all but "


def documented() -> list[list[str]]:
    """Return the cells of the rows of both tables, without headings."""
    section = _SECTION.search(PAGE.read_text())
    assert section is not None
    rows = [line for line in section[1].splitlines() if line.startswith("|") and "---" not in line]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [row for row in cells if row[0] != "State"]


def states_of(cell: str) -> list[ModelState]:
    """Return the states that a cell names."""
    if cell.startswith(_ALL_BUT):
        names = cell.removeprefix(_ALL_BUT).split(" and ")
        return [state for state in ModelState if state not in names]
    return [ModelState(name) for name in cell.split(", ")]


STATES = {ModelState(row[0]): row for row in documented() if len(row) == 4}
ROWS = [
    pytest.param(state, ModelEvent(event), ModelState(following), id=f"{state}: {event}")
    for before, event, following in (row for row in documented() if len(row) == 3)
    for state in states_of(before)
]


def requests_for(state: ModelState) -> str:
    """Return what happens to a request for a model in this state, as the page says it."""
    if state.waits:
        return "wait"
    if state.is_moved:
        return "fail: moved"
    if state is ModelState.WRITTEN:
        return "fail: stopping"
    return "are accepted" if state.place is ModelPlace.MEMORY else "fail: not found"


@pytest.mark.parametrize(("before", "event", "following"), ROWS)
def test_a_documented_event_leads_to_the_documented_state(
    before: ModelState, event: ModelEvent, following: ModelState
) -> None:
    assert after(before, event) is following


def test_each_transition_has_one_row_on_the_page() -> None:
    rows = [row.values[:2] for row in ROWS]
    assert sorted(map(str, rows)) == sorted(map(str, TRANSITIONS))


@pytest.mark.parametrize("state", ModelState)
def test_an_impossible_event_is_an_error_that_names_state_and_event(state: ModelState) -> None:
    impossible = [event for event in ModelEvent if (state, event) not in TRANSITIONS]
    assert impossible
    for event in impossible:
        with pytest.raises(ImpossibleTransition) as raised:
            after(state, event)
        assert f"state {state} " in str(raised.value)
        assert str(raised.value).endswith(event)


def test_the_page_says_of_each_state_where_the_model_is_and_what_requests_do() -> None:
    assert list(STATES) == list(ModelState)
    for state, (_, place, requests, _) in STATES.items():
        assert (place, requests) == (state.place, requests_for(state)), state


def test_each_state_can_be_reached_and_each_event_happens_somewhere() -> None:
    reached, found = {ModelState.ABSENT}, 0
    while len(reached) > found:
        found = len(reached)
        reached |= {after(*each) for each in TRANSITIONS if each[0] in reached}

    assert reached == set(ModelState)
    assert {event for _, event in TRANSITIONS} == set(ModelEvent)


def test_a_model_in_memory_leaves_it_only_for_the_store_another_head_or_a_deletion() -> None:
    for (before, event), following in TRANSITIONS.items():
        if before.place is ModelPlace.MEMORY and following.place is not ModelPlace.MEMORY:
            expected = {
                ModelEvent.STORED,
                ModelEvent.TAKE_OVER,
                ModelEvent.DELETE,
                ModelEvent.NOT_STARTED,
            }
            assert event in expected


def test_a_model_is_never_moved_while_a_task_restores_it() -> None:
    restoring = [state for state in ModelState if state.is_restoring]
    for state, event in product(restoring, (ModelEvent.MOVE, ModelEvent.SUSPEND)):
        with pytest.raises(ImpossibleTransition):
            after(state, event)
