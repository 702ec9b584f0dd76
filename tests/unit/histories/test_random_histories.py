"""Random histories of the whole operator: what must hold once everything has settled.

`make histories` runs many more, by hand.
"""

import os
import subprocess
import sys

import pytest

from tinkercloud_testing.simulation.events import EVENTS
from tinkercloud_testing.simulation.histories import run_history

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 16))]
EVENTS_EACH = 18

PRINT_TRACE = """
from tinkercloud_testing.simulation.histories import run_history, silence
with silence():
    print(*run_history(3, 12).trace, sep="\\n")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_everything_is_in_order_after_a_random_history(seed: int) -> None:
    outcome = run_history(seed, EVENTS_EACH)

    assert outcome.violations == [], outcome.report()


def test_there_are_many_kinds_of_events() -> None:
    assert len(EVENTS) >= 40


@pytest.mark.timeout(300)
def test_a_seed_gives_the_same_history_in_another_process() -> None:
    traces = {
        subprocess.run(
            [sys.executable, "-c", PRINT_TRACE],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        ).stdout
        for seed in ("1", "2")
    }

    assert len(traces) == 1
    assert "EVENT" in traces.pop()
