"""A run that is disturbed once continues with every step that its client got an answer for."""

import pytest

from tinkercloud_testing.simulation.scripts import DISTURBANCES, SHAPES, run_script


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"a head alone"}))
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_no_step_is_lost_by_one_disturbance(disturbance: str, shape: str) -> None:
    outcome = run_script(disturbance, shape, knows_owners=True)

    assert outcome.violations == [], outcome.report()


def test_no_step_is_lost_if_kuberay_counts_the_pods_of_a_deleted_raycluster() -> None:
    outcome = run_script("delete the raycluster", "ranks", knows_owners=False)

    assert outcome.violations == [], outcome.report()
