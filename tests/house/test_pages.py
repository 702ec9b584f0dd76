"""What the pages of docs/ promise to tell, they tell."""

from pathlib import Path

import pytest

from tinkercloud_crds.conditions import Reason

OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_of_a_condition_is_explained(reason: Reason) -> None:
    assert f"`{reason}`" in OPERATIONS
