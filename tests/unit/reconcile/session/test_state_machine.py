"""The state machine of a session is documented in two places and behaves as documented."""

import re
from pathlib import Path

import pytest

from tinkercloud_crds.conditions import ConditionType, find
from tinkercloud_operator.decide.session import lifetime
from tinkercloud_testing.resources.session_world import RAY_CLUSTER, World, a_world

PAGE = Path(__file__).parents[4] / "docs" / "understand" / "suspend-and-resume.md"
_SEPARATOR = re.compile(r"[-\s]+")

Row = list[str]

SETTLED = ["it settles"]
STOPPING = ["its owner suspends it", "the operator reconciles"]
SAVED = [*STOPPING, "the operator reconciles", "the operator reconciles"]
TERMINATING = [*SAVED, "the operator reconciles"]
PODS_END = ["KubeRay works", *["a pod advances"] * 5, "the operator reconciles"]
LOOKS = ["the operator reconciles"] * 2
WAIT = ["a minute passes", "the operator reconciles"] * 4
IDLE_STOP = ["half an hour passes", "the operator reconciles"]

WALKS: dict[tuple[str, str], tuple[str, list[str], list[str]]] = {
    ("Running", "`spec.suspend` is set"): ("workers", SETTLED, STOPPING),
    ("Running", "`spec.suspend` is set before there are pods"): ("workers", [], STOPPING),
    ("Running", "it is idle, with idle action Suspend"): ("workers", SETTLED, IDLE_STOP),
    ("Running", "it is idle, with idle action Delete, and is declared"): (
        "deleted when idle",
        SETTLED,
        IDLE_STOP,
    ),
    ("Running", "it is idle, with idle action Delete, and belongs to a client"): (
        "for a client, short life",
        SETTLED,
        IDLE_STOP,
    ),
    ("Running", "one of its nodes is cordoned"): (
        "workers",
        SETTLED,
        ["a node is cordoned", "the operator reconciles"],
    ),
    ("Running", "its head or a trainer is evicted, or on a node that ends"): (
        "workers",
        SETTLED,
        ["the trainers are evicted", "the operator reconciles"],
    ),
    ("Running", "its pods, including the head, fail until the start deadline"): (
        "workers",
        [*SETTLED, "containers restart", "images are missing", "the operator reconciles"],
        ["a day passes", "the operator reconciles"],
    ),
    ("Running", "its head exits too often"): (
        "workers",
        [*SETTLED, *["containers restart", "it settles"] * 9, "containers restart"],
        ["a pod advances", *LOOKS],
    ),
    ("Running", "its maximum lifetime ends"): (
        "short life",
        SETTLED,
        ["a day passes", "the operator reconciles"],
    ),
    ("Running", "somebody deletes its RayCluster"): (
        "workers",
        SETTLED,
        ["the RayCluster is deleted", *LOOKS],
    ),
    ("Running", "it is deleted"): ("workers", SETTLED, ["it is deleted"]),
    ("Stopping", "the head completes the save"): ("workers", [*SETTLED, *STOPPING], LOOKS),
    ("Stopping", "the head does not complete the save"): (
        "workers",
        [*SETTLED, "the store is away", *STOPPING],
        WAIT,
    ),
    ("Stopping", "its maximum lifetime ends before the head completes the save"): (
        "short life",
        [*SETTLED, "the store is away", *STOPPING],
        ["a day passes", "the operator reconciles"],
    ),
    ("Stopping", "the head is lost"): (
        "workers",
        [*SETTLED, "the head stops responding", *STOPPING],
        ["the head is lost", "a pod advances", "the operator reconciles"],
    ),
    ("Stopping", "a disrupted session has used up its time to save"): (
        "workers",
        [*SETTLED, "the store is away", "a node gets a spot notice", "the operator reconciles"],
        WAIT,
    ),
    ("Stopping", "a client sends a request"): (
        "workers",
        [*SETTLED, *IDLE_STOP],
        ["a client sends a request", "the operator reconciles"],
    ),
    ("Saved", "the operator deletes the RayCluster"): (
        "workers",
        [*SETTLED, *SAVED],
        ["the operator reconciles"],
    ),
    ("Terminating", "the last pod ends"): ("workers", [*SETTLED, *TERMINATING], PODS_END),
    ("Terminating", "the last pod ends, after its maximum lifetime"): (
        "short life",
        [*SETTLED, "a day passes", *["the operator reconciles"] * 4],
        PODS_END,
    ),
    ("Terminating", "a client sends a request, and the RayCluster is gone"): (
        "workers",
        [*SETTLED, *IDLE_STOP, *["the operator reconciles"] * 3],
        [
            "KubeRay works",
            "a client sends a request",
            "the operator reconciles",
            "the operator reconciles",
        ],
    ),
    ("Suspended", "a client sends a request to an idle session"): (
        "workers",
        [*SETTLED, "half an hour passes", "it settles"],
        ["a client sends a request", *LOOKS],
    ),
    ("Suspended", "`spec.suspend` is cleared"): (
        "workers",
        [*SETTLED, "its owner suspends it", "it settles"],
        ["its owner resumes it", *LOOKS],
    ),
    ("Suspended", "it is retried after its pods have failed"): (
        "workers",
        [*SETTLED, *["containers restart", "it settles"] * 10],
        ["its owner retries it", *LOOKS],
    ),
    ("Suspended", "its maximum lifetime ends"): (
        "short life",
        [*SETTLED, "its owner suspends it", "it settles"],
        ["a day passes", "the operator reconciles"],
    ),
    ("Suspended", "it is deleted"): (
        "workers",
        [*SETTLED, "its owner suspends it", "it settles"],
        ["it is deleted", "the operator reconciles"],
    ),
    ("Finished", "its TTL passes, and it belongs to a client"): (
        "for a client, short life",
        [*SETTLED, "a client sends a request", "a day passes", "it settles"],
        ["a day passes", *LOOKS],
    ),
    ("Deleting", "the head completes the checkpoint"): (
        "workers",
        [*SETTLED, "it is deleted"],
        ["the operator reconciles"] * 3,
    ),
    ("Deleting", "the head does not complete the checkpoint in time"): (
        "workers",
        [*SETTLED, "the head stops responding", "it is deleted", "the operator reconciles"],
        WAIT,
    ),
}
"""By state and event: the offer, the events that lead to the state, and the event itself."""


def rows(text: str) -> list[Row]:
    """Return the cells of every table row in a text, without separators."""
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if "|" in line[:1]]
    found = [[cell.strip() for cell in line] for line in lines]
    return [row for row in found if not all(_SEPARATOR.fullmatch(cell) for cell in row)]


DOCUMENTED = rows(lifetime.__doc__ or "")
STATES = {row[0]: row for row in DOCUMENTED if len(row) == 4}
TRANSITIONS = [row for row in DOCUMENTED if len(row) == 3][1:]


def state(world: World) -> str:
    """Return the state that a session is in, by the object, its status and its children."""
    cluster, status = world.children.get(RAY_CLUSTER), world.status
    suspended = find(status.conditions, ConditionType.SUSPENDED)
    if world.is_gone:
        return "Deleted"
    if world.known.session.deleted is not None:
        return "Deleting"
    if suspended is None or suspended.status == "False":
        return "Finished" if status.phase == "Finished" else "Running"
    if suspended.status == "True":
        return "Suspended"
    if cluster is None or "deletionTimestamp" in cluster["metadata"]:
        return "Terminating"
    return "Saved" if status.incarnation == status.saved_incarnation else "Stopping"


def test_the_page_and_the_docstring_have_the_same_tables() -> None:
    about_sessions, _, _ = PAGE.read_text().partition("## A model in a head")
    assert rows(about_sessions) == DOCUMENTED
    assert len(STATES) == 9
    assert len(TRANSITIONS) == len(WALKS)


@pytest.mark.parametrize(("before", "event", "after"), TRANSITIONS)
def test_a_transition_leads_from_its_state_to_the_next_one(
    before: str, event: str, after: str
) -> None:
    offer, history, events = WALKS[before, event]
    world = a_world(offer, *history)
    check_state(world, before)

    world.happen(*events)

    check_state(world, after)


def check_state(world: World, name: str) -> None:
    """Check that a session is in a state, with the condition and RayCluster of its row."""
    assert state(world) == name
    _, suspended, ray_cluster, _ = STATES[name]
    condition = find(world.status.conditions, ConditionType.SUSPENDED)
    if condition is not None and suspended in {"True", "False", "Unknown"}:
        assert condition.status == suspended
    cluster = world.children.get(RAY_CLUSTER)
    if ray_cluster == "none" and name != "Deleted":
        assert cluster is None
        assert world.pods == {}
    if ray_cluster == "deleted":
        assert cluster is None or "deletionTimestamp" in cluster["metadata"]
