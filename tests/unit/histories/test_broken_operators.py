"""Histories show that an operator is broken. By hand: `make histories`."""

import os
from collections.abc import Iterator
from itertools import product

import pytest

from tinkercloud_testing.simulation.broken_operators import BROKEN
from tinkercloud_testing.simulation.histories import Outcome, run_history
from tinkercloud_testing.simulation.scripts import DISTURBANCES, SHAPES, run_script

MOST = int(os.environ.get("TINKERCLOUD_TEST_BROKEN_HISTORIES", "0"))
"""How many histories may pass before one must show it."""

pytestmark = [
    pytest.mark.skipif(not MOST, reason="takes minutes; by hand: make histories"),
    pytest.mark.timeout(3600),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_history_shows_that_the_operator_is_broken(broken: str) -> None:
    with BROKEN[broken]():
        shown = next((outcome for outcome in histories() if outcome.violations), None)

    assert shown is not None, f"no history of {MOST} shows it"
    print(f"{broken}: {shown.violations[0]} (seed {shown.seed})")  # noqa: T201 - for the reader


def histories() -> Iterator[Outcome]:
    for shape, disturbance in product(SHAPES, DISTURBANCES):
        yield run_script(disturbance, shape, knows_owners=True)
    for seed in range(MOST):
        yield run_history(seed, 25)
